"""What a user gave cannot be used: one exception, one form.

Every error that reaches a person says where (file, line or field), what was found, what was wanted and, where it
helps, what to do. The command line prints it without a traceback and exits with status 2.
"""


class Refusal(ValueError):
    """Input, a setting or a file that latemask will not work with.

    ``where``: file, ``file:line`` or dotted field. ``found`` and ``wanted``: short phrases. ``do``: the next step.
    """

    def __init__(self, where: object, found: str, wanted: str, do: str = ""):
        where, found = (" ".join(text.split("\n")).strip() for text in (str(where), found))  # libraries speak in lines
        self.where, self.found, self.wanted, self.do = where, found, wanted, do
        super().__init__(f"{where}: found {found}; wanted {wanted}" + (f". {do}" if do else ""))

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str]]:
        return type(self), (self.where, self.found, self.wanted, self.do)
