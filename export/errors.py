"""The one way an export is refused. Its text is for the person at the command line."""


class ExportError(Exception):
    """The export cannot go on; the text is one line: what, the value, the limit, what to do."""
