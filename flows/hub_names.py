"""What the Hub takes for a card's licence and languages, checked in the recipe: before anything runs, by its key."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from headwater.data_cards.licences import LICENCES
from headwater.flows.suggest import did_you_mean

_LANGUAGE_CODE = re.compile(r"^[a-z]{2,3}$")
_SPECIAL_LANGUAGES = ("code", "multilingual")
_LANGUAGE_NAMES = {
    **{"arabic": "ar", "bengali": "bn", "bulgarian": "bg", "catalan": "ca", "chinese": "zh", "croatian": "hr"},
    **{"czech": "cs", "danish": "da", "dutch": "nl", "english": "en", "estonian": "et", "finnish": "fi"},
    **{"french": "fr", "german": "de", "greek": "el", "hebrew": "he", "hindi": "hi", "hungarian": "hu"},
    **{"indonesian": "id", "irish": "ga", "italian": "it", "japanese": "ja", "korean": "ko", "latin": "la"},
    **{"latvian": "lv", "lithuanian": "lt", "norwegian": "no", "persian": "fa", "polish": "pl", "portuguese": "pt"},
    **{"romanian": "ro", "russian": "ru", "serbian": "sr", "slovak": "sk", "slovenian": "sl", "spanish": "es"},
    **{"swahili": "sw", "swedish": "sv", "tamil": "ta", "thai": "th", "turkish": "tr", "ukrainian": "uk"},
    **{"urdu": "ur", "vietnamese": "vi", "welsh": "cy"},
}
"""What people write instead, for a suggestion only: every code of the right shape is taken."""


def _licence(name: str) -> str:
    if name not in LICENCES:
        guess = did_you_mean(re.sub(r"[\s_]+", "-", name.strip().lower()), LICENCES)
        raise ValueError(
            f"the Hub knows no licence by this name. {guess}For one of your own write `other`, with `license_name` and "
            "`license_link`; the names are in https://huggingface.co/docs/hub/repositories-licenses"
        )
    return name


def _language(code: str) -> str:
    if _LANGUAGE_CODE.match(code) is None and code not in _SPECIAL_LANGUAGES:
        raise ValueError(
            f"the Hub knows no such language. {_meant(code)}It takes two or three lower-case letters (ISO 639), `code` "
            "or `multilingual`"
        )
    return code


def _meant(code: str) -> str:
    word = code.strip().lower()
    first = re.split(r"[-_]", word)[0]
    if _LANGUAGE_CODE.match(first):
        return f"Did you mean {first!r}? "
    close = did_you_mean(word, (*_LANGUAGE_NAMES, *_SPECIAL_LANGUAGES))
    name = close.partition("'")[2].partition("'")[0]
    return f"Did you mean {_LANGUAGE_NAMES.get(name, name)!r}? " if name else ""


def _not_norwegian(code: Any) -> Any:
    if code is False:
        raise ValueError("YAML reads a bare `no` as false: write 'no' in quotes for Norwegian")
    return code


HubLicence = Annotated[str, AfterValidator(_licence)]
HubLanguage = Annotated[str, BeforeValidator(_not_norwegian), AfterValidator(_language)]
