"""Shipped LightningCLI recipes: plain YAML files, found by `mmpe fit --config vit/digits.yaml` from any folder."""
