"""What users install, used as they do: `make wheel`, where nothing of the checkout can be imported."""
