import pytest

from flt_mol.analysis.tables import markdown_table


def test_every_line_is_a_row_of_equal_width():
    lines = markdown_table(["family", "a", "b"], [("x", 1, 2.5), ("longer name", 10000, "")])
    lines = lines.splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[3].strip("|").split("|")] == ["longer name", "10000", ""]
    assert lines[1].replace(" ", "").strip("|").split("|")[1] == "----:"


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="3 cells: a, b, c"):
        markdown_table(["a", "b", "c"], [(1, 2)])
