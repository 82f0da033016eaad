"""Records as Markdown, tables and plots."""
