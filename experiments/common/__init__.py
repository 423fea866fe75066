"""What the experiments share: timing, results files, tables, figures, the training loop, rivals."""
