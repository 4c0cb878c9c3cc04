"""A workflow's report: its steps, numbers and curves as Markdown and as one HTML file."""
