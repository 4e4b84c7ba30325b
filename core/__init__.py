"""Floor 1: rows and schemas, errors, run store, journal, meter, seeds. Free of torch and of every model."""
