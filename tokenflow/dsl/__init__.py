"""Recipes: how one request flows between models, written down and compiled to one frozen form."""
