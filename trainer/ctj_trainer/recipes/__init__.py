"""Recipes that come with the trainer."""
