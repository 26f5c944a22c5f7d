"""Corpora, tokenizers, token shards and the input pipeline. Needs the extra `data`."""

from jaxmix.data.corpora import CORPORA, Corpus, Document, load_corpus
from jaxmix.data.pipeline import packed_batches, state_from_json, state_to_json
from jaxmix.data.prepare import PreparedData, encode_documents, prepare
from jaxmix.data.shards import Manifest, SplitManifest, read_shards, write_shards
from jaxmix.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, build_tokenizer, load_tokenizer

__all__ = [
    "CORPORA",
    "ByteTokenizer",
    "Corpus",
    "Document",
    "HuggingFaceTokenizer",
    "Manifest",
    "PreparedData",
    "SplitManifest",
    "Tokenizer",
    "build_tokenizer",
    "encode_documents",
    "load_corpus",
    "load_tokenizer",
    "packed_batches",
    "prepare",
    "read_shards",
    "state_from_json",
    "state_to_json",
    "write_shards",
]
