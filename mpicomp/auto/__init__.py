"""Choice between the exact mean and a method that compresses, by measured times."""
