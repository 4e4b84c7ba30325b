"""Near-duplicate texts, in memory: for sets of up to some hundred thousand short texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from headwater.core.errors import ConfigError
from headwater.core.text import normalise, words

if TYPE_CHECKING:
    from datatrove.pipeline.dedup.minhash import MinhashDedupSignature

N_HASHES = 128
"""Hashes in a signature, split into buckets according to the threshold."""

MISS_LIMIT = 1e-3
"""Largest acceptable chance that a pair exactly at the threshold shares no bucket and is overlooked."""

MIN_THRESHOLD = 0.1
"""Below this the signature is too short to keep the miss limit."""


def near_duplicates(
    texts: Sequence[str], *, threshold: float = 0.8, n_gram: int = 3, seed: int = 1
) -> list[int | None]:
    """For each text the index of the earlier, kept text that it duplicates, or None for a text to keep.

    Two texts are near-duplicates when the Jaccard similarity of their sets of word `n_gram`-grams reaches `threshold`
    (case, punctuation and spacing aside). datatrove's MinHash signatures find the candidates and the exact similarity
    decides, so there is no false positive, and a pair at the threshold is overlooked with a chance below MISS_LIMIT
    (computed for independent hashes). A text is compared with kept texts only: no two texts that remain resemble each
    other, and nothing is dropped for resembling a text that was dropped itself. Of several kept texts that resemble
    it, the most similar counts, then the earliest. Texts with fewer words than `n_gram` duplicate equal texts alone.
    """
    if not MIN_THRESHOLD <= threshold <= 1:
        raise ConfigError(
            f"The near-duplicate threshold is {threshold}.", todo=f"Choose a similarity from {MIN_THRESHOLD} to 1."
        )
    if n_gram < 1:
        raise ConfigError(f"n_gram is {n_gram}.", todo="Use at least 1 word; 3 suits short texts.")
    minhash = _signatures(n_gram, N_HASHES // _hashes_per_bucket(threshold), seed)
    kept: dict[tuple[int, ...], list[int]] = {}
    shingles: dict[int, frozenset[int]] = {}
    originals: list[int | None] = []
    for index, text in enumerate(texts):
        hashed = minhash.get_shingles(text)
        own = frozenset(hashed.ravel().tolist())
        buckets = [(number, *signature) for number, signature in enumerate(minhash.get_signature(hashed))]
        candidates = sorted({other for bucket in buckets for other in kept.get(bucket, ())})
        original = _most_similar(own, candidates, shingles, threshold)
        originals.append(original)
        if original is None:
            shingles[index] = own
            for bucket in buckets:
                kept.setdefault(bucket, []).append(index)
    return originals


def _shingle_words(text: str, n_gram: int) -> list[str]:
    found = words(text)
    if len(found) >= n_gram:
        return found
    # One n-gram that stands for the whole text: padding keeps it apart from the n-grams of longer texts.
    return [" ".join(found) or normalise(text), *[""] * (n_gram - 1)]


def _hashes_per_bucket(threshold: float) -> int:
    """As many as the miss limit allows: the fewer, the more candidates have to be compared in vain."""
    sizes = [size for size in range(1, N_HASHES + 1) if N_HASHES % size == 0]
    return max(size for size in sizes if (1 - threshold**size) ** (N_HASHES // size) <= MISS_LIMIT)


def _most_similar(
    own: frozenset[int], candidates: list[int], shingles: dict[int, frozenset[int]], threshold: float
) -> int | None:
    similar = [(-_jaccard(own, shingles[other]), other) for other in candidates]
    best = min(similar, default=(0.0, 0))
    return best[1] if similar and -best[0] >= threshold else None


def _jaccard(first: frozenset[int], second: frozenset[int]) -> float:
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)


@cache
def _signatures(n_gram: int, num_buckets: int, seed: int) -> MinhashDedupSignature:
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
    from datatrove.utils.hashing import HashConfig
    from datatrove.utils.text import TextNormConfig
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Words(WordTokenizer):  # type: ignore[misc]  # datatrove is untyped
        """Stands in for datatrove's own tokenizers, which need spaCy and a language."""

        def word_tokenize(self, text: str) -> list[str]:
            return _shingle_words(text, n_gram)

        def sent_tokenize(self, text: str) -> list[str]:
            return [text]

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            return [(0, len(text))]

    untouched = TextNormConfig(
        lowercase=False,
        norm_whitespace=False,
        remove_punctuation=False,
        norm_unicode_diacritics=False,
        # On by default, which would make one of two sums that differ in their numbers alone a duplicate.
        norm_numbers=False,
    )
    config = MinhashConfig(
        n_grams=n_gram,
        num_buckets=num_buckets,
        hashes_per_bucket=N_HASHES // num_buckets,
        seed=seed,
        norm_config=untouched,
        # datatrove's xxhash path passes str, which recent xxhash releases refuse.
        hash_config=HashConfig(precision=64, hash_fc="sha1"),
    )
    # Signatures are made in memory; the folder is never written to.
    return MinhashDedupSignature("memory://minhash", config=config, language=Words())
