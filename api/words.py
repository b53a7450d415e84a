"""`{uid:word}` in a path: a segment without a colon, behind which the verbs are."""

from __future__ import annotations

from starlette.convertors import Convertor, register_url_convertor


class Word(Convertor[str]):
    regex = "[^/:]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("word", Word())
