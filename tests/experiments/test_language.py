"""The language models: causal, the same token by token, and where their attention lies."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))


@pytest.fixture
def model():
    return importlib.import_module("language.model")


def net(model, name):
    torch.manual_seed(0)
    size = model.Size(2, 40, 16, 2, 16, 8, 4, 8, vocabulary=50)
    return model.LanguageModel(size, model.ATTENTIONS[name]).double().eval()


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_no_model_sees_the_token_that_it_predicts(model):
    tokens = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[:, 30:] = (other[:, 30:] + 1) % 50
    for name in model.ATTENTIONS:
        both = net(model, name)
        before, after = both(tokens), both(other)
        torch.testing.assert_close(after[:, :30], before[:, :30], rtol=1e-8, atol=1e-8)
        assert (after - before)[:, 30:].abs().max() > 1e-3, name


@pytest.mark.parametrize("name", ["Performer", "FLT (Gaussian mixture)", "FLT (local)"])
def test_generation_by_steps_is_that_of_the_whole_forward(model, name):
    tokens = torch.randint(50, (2, 20), generator=torch.Generator().manual_seed(0))
    trained = net(model, name)
    chosen, logits = trained.generate(tokens, 12)
    for _ in range(12):
        last = trained(tokens)[:, -1]
        tokens = torch.cat([tokens, last.argmax(-1, keepdim=True)], 1)
    torch.testing.assert_close(chosen, tokens[:, 20:])
    torch.testing.assert_close(logits, trained(tokens[:, :-1])[:, -12:])


def test_matrices_of_all_layers_are_the_weights_in_use(model):
    analysis = importlib.import_module("language.analysis")
    tokens = torch.randint(50, (3, 40), generator=torch.Generator().manual_seed(0))
    trained = net(model, "FLT (local)")
    layers = analysis.attention_matrices(trained, tokens)
    assert [tuple(layer.shape) for layer in layers] == 2 * [(3, 2, 40, 40)]
    torch.testing.assert_close(layers[1].sum(-1), torch.ones(3, 2, 40))
    block = trained.encoder.blocks[0]
    h = block.attention_norm(trained.embedded(tokens))
    value = block.attention.value(h).view(3, 40, 2, 8)
    out = torch.einsum("bhij,bjhd->bihd", layers[0], value).flatten(2)
    torch.testing.assert_close(block.attention.out(out), block.attention(h))


@pytest.mark.parametrize("name", ["FLT (Gaussian mixture), decaying", "FLT (local), decaying"])
def test_attention_that_starts_to_decay(model, name):
    block = net(model, name).encoder.blocks[0]
    torch.nn.init.zeros_(block.attention.query.weight)
    torch.nn.init.zeros_(block.attention.key.weight)
    (weights,) = block.attention.matrices(torch.randn(40, 16))
    last = weights[:, -1].log()
    rates = torch.tensor([0.2, 0.08])
    torch.testing.assert_close(last[:, -1] - last[:, 0], 39 * rates, rtol=1e-4, atol=1e-4)
    rise = last.diff(dim=-1) / rates[:, None]
    assert (rise > 0.6).all()
    assert (rise < 1.4).all()


def test_shares_of_attention_to_one_place():
    shares = importlib.import_module("language.analysis").shares
    itself, first = torch.eye(30), torch.zeros(30, 30)
    first[:, 0] = 1.0
    assert shares(itself) == (1.0, 0.0)
    assert shares(first) == (0.0, 1.0)


def test_texts_are_there_and_windows_cover_them():
    text = importlib.import_module("language.text")
    name, topics = text.read_text("pydoc_topics")
    assert name == "pydoc_topics"
    assert "assignment" in topics
    name, docstrings = text.read_text("stdlib_docstrings")
    assert len(docstrings) > 2 * len(topics)
    ids = torch.arange(101)
    found = text.windows(ids, 20)
    torch.testing.assert_close(found[:, 1:].flatten(), ids[1:])
    one, again = (text.batches(ids, 20, 3, 2, seed=5) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert all((batch.diff(dim=1) == 1).all() for batch in one)


@pytest.mark.slow
def test_a_small_run_of_all_models(tmp_path):
    pytest.importorskip("tokenizers")
    command = [sys.executable, "language/run.py", "--smoke"]
    command += ["--results", tmp_path / "results.jsonl", "--figure", tmp_path / "heads.png"]
    done = subprocess.run(command, cwd=EXPERIMENTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tokens generated: the same" in done.stdout
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 16
    assert (tmp_path / "heads.png").stat().st_size > 1000
