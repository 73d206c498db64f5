"""Tables: what each shows, its cells, and their LaTeX."""
