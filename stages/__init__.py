"""Floor 4: one stage per file. A stage turns rows into rows."""
