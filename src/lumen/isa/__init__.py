"""AMD assembly text: parser and resource report; later the interpreter that executes it."""
