"""Other engines, asked the same questions as ours."""
