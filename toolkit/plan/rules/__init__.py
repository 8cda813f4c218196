"""The rules of `toolkit.facts.rules`, each a small pure function under its id."""
