"""Write a validation report for people (terminal, Markdown, HTML) and for programs (JSON)."""
