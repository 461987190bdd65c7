"""Fine-tune a pretrained transformer through several methods, and compare them."""
