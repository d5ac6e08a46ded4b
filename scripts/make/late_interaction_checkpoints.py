"""Write tests/data/late_interaction: tiny random ColBERT models with tokenizers, and goldens of the tool for each.

The cases of PyLate and of Stanford's layout, which PyLate reads, need the environment `pylate` of scripts/peers.sh
(PyLate 1.6.0, sentence-transformers 5.3.0, transformers 5.3.0, torch 2.13.0), those of sentence-transformers and of
Jina, which is computed here, the environment `hf` (sentence-transformers 6.2.0):
`python scripts/make.py late_interaction_checkpoints CASE ...`. The same versions write the same bytes, except that
another CPU rounds the vectors of the goldens otherwise, by up to 5e-6.

Each case is a folder as the tool writes it (weights in float32) and golden.npz: texts, the tokens of each as a query
and as a document, the tool's vectors for both, the scores [query, document], and the versions.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Callable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from make.tiny_checkpoints import OWN_HEADS, fill, run

TEXTS = (
    "bees",
    "How do bees talk?",
    "Bees dance, and others watch (so it seems): to the left; to the right.",
    "the cab, a bad cafe, a faded face... " * 3,
    "!?",
    " \n Bees, by the \u00e6ther? \t",
)
"""The last one has tokens that a BERT does not know, and blanks around it, which PyLate takes away."""
PACKAGES = ("pylate", "sentence-transformers", "transformers", "torch")
LETTERS = string.ascii_lowercase + string.digits
SPECIALS = ("[PAD]", "[unused0]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("bees", "how", "do", "dance", "the", "cafe", "##ced", "##es")
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}


def word_pieces(folder: Path) -> Any:
    """Write the vocabulary of a BERT, and return its tokenizer, which lowercases."""
    words = [*SPECIALS, *string.punctuation, *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS]
    tokenizer = transformers.BertTokenizerFast(vocab={word: i for i, word in enumerate(words)})
    tokenizer.save_pretrained(folder)
    return tokenizer


def byte_pairs(folder: Path, **specials: str) -> Any:
    """Write a byte-level tokenizer with these special tokens; a text begins with the first, and ends with sep_token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: i for i, word in enumerate([*specials.values(), *alphabet, "be", "es", "\u0120b"])}
    backend = Tokenizer(models.BPE(vocab, [("b", "e"), ("e", "s"), ("\u0120", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    first, last = next(iter(specials.values())), specials.get("sep_token", "")
    ends = [(each, vocab[each]) for each in (first, last) if each]
    backend.post_processor = processors.TemplateProcessing(single=f"{first} $A {last}".strip(), special_tokens=ends)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **specials)
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_model(folder: Path, model_class: Any, config: Any) -> None:
    """Write a random model."""
    model = model_class(config)
    fill(model, 0, norm_offset=0.0, scales_embeddings=False)
    model.save_pretrained(folder)


def write_bert(folder: Path) -> Any:
    """Write a BERT with its tokenizer, and return the tokenizer."""
    tokenizer = word_pieces(folder)
    write_model(folder, transformers.BertModel, transformers.BertConfig(vocab_size=len(tokenizer), **SIZES))
    return tokenizer


def drawn(*shape: int, seed: int = 7) -> Any:
    """Return random weights."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32)) / shape[-1] ** 0.5


def stanford(folder: Path) -> Any:
    """Write Stanford's layout: one weight beside the encoder's, and the settings in artifact.metadata."""
    from pylate.models import ColBERT

    write_bert(folder)
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"linear.weight": drawn(16, 32)}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    settings = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": 20, "doc_maxlen": 30}
    settings |= {"dim": 16, "similarity": "cosine", "mask_punctuation": True, "attend_to_mask_tokens": False}
    (folder / "artifact.metadata").write_text(json.dumps(settings, indent=2))
    return ColBERT(str(folder), device="cpu")


def pylate(folder: Path, denses: list[Any], **settings: Any) -> Any:
    """Write a folder as PyLate does, of the model that is in it, and return PyLate's.

    `encode` of PyLate leaves its cuts and fillers in the tokenizer, which is written with them.
    """
    from pylate.models import ColBERT, Dense
    from sentence_transformers.models import Transformer

    modules = [Transformer(str(folder)), *(Dense(*sizes, **options) for *sizes, options in denses)]
    model = ColBERT(modules=modules, device="cpu", **settings)
    for seed, dense in enumerate(modules[1:]):
        for parameter in dense.parameters():
            parameter.data.copy_(drawn(*parameter.shape, seed=seed))
    rows = model[0].auto_model.get_input_embeddings().weight
    rows.data[-2:] = drawn(2, rows.shape[1], seed=5)  # those of the marks
    model.encode(["bees"], is_query=True)
    model.save_pretrained(str(folder), create_model_card=False)
    return ColBERT(str(folder), device="cpu")


def write_modernbert(folder: Path) -> None:
    """Write a ModernBERT with windows of 12 tokens to each side, and its tokenizer."""
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    tokenizer = byte_pairs(folder, **names)
    ids = {"pad_token_id": 3, "cls_token_id": 0, "sep_token_id": 1, "bos_token_id": 0, "eos_token_id": 1}
    sizes = SIZES | {"num_hidden_layers": 4, "local_attention": 24}
    config = transformers.ModernBertConfig(vocab_size=len(tokenizer), **sizes, **ids)
    write_model(folder, transformers.ModernBertModel, config)


def pylate_modernbert(folder: Path) -> Any:
    """Write a ModernBERT with a head of three layers."""
    write_modernbert(folder)
    silu = {"bias": True, "use_residual": True, "activation_function": torch.nn.SiLU()}
    denses = [[32, 24, silu], [24, 24, {"bias": False, "use_residual": True}], [24, 16, {"bias": False}]]
    return pylate(folder, denses, query_length=13, document_length=40)


def pylate_long_queries(folder: Path) -> Any:
    """Write a ModernBERT whose windows end before the fillers of short queries do, with the keys of PyLate 1.1."""
    from pylate.models import ColBERT

    write_modernbert(folder)
    pylate(folder, [[32, 16, {"bias": False}]], query_length=40, document_length=50)
    for name, keys in (
        ("config_sentence_transformers.json", ("model_type", "do_query_expansion")),
        ("1_Dense/config.json", ("use_residual", "module_input_name", "module_output_name")),
    ):
        settings = json.loads((folder / name).read_text())
        kept = {key: value for key, value in settings.items() if key not in keys}
        (folder / name).write_text(json.dumps(kept, indent=2))
    return ColBERT(str(folder), device="cpu")


def pylate_bert(folder: Path) -> Any:
    """Write a BERT that attends to fillers, with a list of words to skip, one of them unknown."""
    write_bert(folder)
    settings: dict[str, Any] = {"query_prefix": "[unused0]", "document_prefix": "[unused1]"}
    settings |= {"query_length": 20, "document_length": 30, "attend_to_expansion_tokens": True}
    return pylate(folder, [[32, 16, {"bias": False}]], skiplist_words=["!", "?", "bees", "hive"], **settings)


def pylate_roberta(folder: Path) -> Any:
    """Write an XLM-RoBERTa with prompts, and without a mark of documents."""
    names = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "mask_token": "<mask>"}
    tokenizer = byte_pairs(folder, **names)
    config = transformers.XLMRobertaConfig(vocab_size=len(tokenizer), type_vocab_size=1, pad_token_id=1, **SIZES)
    write_model(folder, transformers.XLMRobertaModel, config)
    settings: dict[str, Any] = {"prompts": {"query": "how: ", "document": "the: "}, "document_prefix": ""}
    tanh = {"activation_function": torch.nn.Tanh()}
    return pylate(folder, [[32, 16, tanh]], query_length=20, document_length=30, **settings)


def pylate_lfm2(folder: Path) -> Any:
    """Write an LFM2, a decoder, whose queries are not expanded."""
    tokenizer = byte_pairs(folder, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    sizes = OWN_HEADS | {"vocab_size": len(tokenizer), "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1}
    config = transformers.Lfm2Config(
        **sizes | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    )
    write_model(folder, transformers.Lfm2Model, config)
    return pylate(folder, [[32, 16, {"bias": False}]], query_length=14, document_length=40, do_query_expansion=False)


def multi_vector(folder: Path) -> Any:
    """Write a model of sentence-transformers' own: short queries are filled up with tokens that others attend to."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
    from sentence_transformers.sentence_transformer.modules import Normalize

    write_bert(folder)
    expansion = {"strategy": "min", "attend": True, "length": 12}
    encoder = Transformer(str(folder), query_length=20, document_length=30, query_expansion=expansion)
    dense = Dense(32, 16, activation_function=torch.nn.Tanh(), module_input_name="token_embeddings")
    for parameter in dense.parameters():
        parameter.data.copy_(drawn(*parameter.shape))
    mask, normalize = MultiVectorMask(list("?!,;")), Normalize(module_input_name="token_embeddings")
    prompts = {"query": "how: ", "document": "the: "}
    modules = [encoder, dense, mask, normalize]
    model = MultiVectorEncoder(modules=modules, prompts=prompts, similarity_fn_name="meanmaxsim", device="cpu")
    model.save_pretrained(str(folder), create_model_card=False)
    return MultiVectorEncoder(str(folder), device="cpu")


class Computed:
    """Jina ColBERT v2 in PyTorch: Hugging Face's encoder, the projection, and the texts' forms of artifact.metadata."""

    prompts: Mapping[str, str] = MappingProxyType({"query": "", "document": ""})

    def __init__(self, folder: Path, encoder: Any, weight: Any, lengths: Mapping[str, int]) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.encoder, self.weight, self.lengths = encoder.eval(), weight, lengths

    def preprocess(self, texts: list[str], prompt: str, task: str) -> dict[str, Any]:
        """Return the tokens of one text as a query or a document."""
        del prompt
        vocab, length = self.tokenizer.get_vocab(), self.lengths[task]
        texts = [text.strip() for text in texts]  # as PyLate, which Jina recommends
        [ids] = self.tokenizer(texts, truncation=True, max_length=length - 1)["input_ids"]
        ids = [ids[0], vocab[f"[{task.capitalize()}Marker]"], *ids[1:]]
        if task == "query":
            ids += [self.tokenizer.mask_token_id] * (length - len(ids))
        return {"input_ids": torch.tensor([ids])}

    def encode_query(self, texts: list[str], **options: Any) -> list[np.ndarray]:
        """Return the vectors of one query; all tokens attend to all."""
        del options
        ids = self.preprocess(texts, "", "query")["input_ids"]
        hidden_td = self.encoder(input_ids=ids).last_hidden_state[0]
        return [torch.nn.functional.normalize(hidden_td @ self.weight.T, dim=1).numpy()]

    def encode_document(self, texts: list[str], **options: Any) -> list[np.ndarray]:
        """Return the vectors of one document without its punctuation."""
        del options
        ids = self.preprocess(texts, "", "document")["input_ids"]
        hidden_td = self.encoder(input_ids=ids).last_hidden_state[0]
        vectors = torch.nn.functional.normalize(hidden_td @ self.weight.T, dim=1).numpy()
        vocab = self.tokenizer.get_vocab()
        return [vectors[~np.isin(ids[0].numpy(), [vocab[mark] for mark in string.punctuation])]]

    def similarity(self, queries: list[Any], documents: list[Any]) -> Any:
        """Return MaxSim of all pairs."""
        return torch.stack(
            [torch.stack([(query @ each.T).max(dim=1).values.sum() for each in documents]) for query in queries]
        )


def jina(folder: Path) -> Computed:
    """Write the layout of Jina ColBERT v2: Jina's names and keys of an XLM-RoBERTa, and Stanford's settings."""
    names = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "mask_token": "<mask>"}
    marks = {"bos_token": "[QueryMarker]", "eos_token": "[DocumentMarker]"}
    tokenizer = byte_pairs(folder, **names, **marks)
    config = transformers.JinaEmbeddingsV3Config(vocab_size=len(tokenizer), type_vocab_size=1, pad_token_id=1, **SIZES)
    encoder = transformers.JinaEmbeddingsV3Model(config)
    fill(encoder, 0, norm_offset=0.0, scales_embeddings=False)
    encoder.save_pretrained(folder, save_original_format=True)
    weight = drawn(16, 32)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"linear.weight": weight}, folder / "model.safetensors", {"format": "pt"})
    keys = {"architectures": ["HF_ColBERT"], "model_type": "xlm-roberta", "position_embedding_type": "rotary"}
    keys |= {"rotary_emb_base": config.rope_parameters["rope_theta"]}
    written = json.loads((folder / "config.json").read_text())
    del written["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(written | keys, indent=2))
    settings = {
        "query_maxlen": 20,
        "doc_maxlen": 30,
        "dim": 16,
        "mask_punctuation": True,
        "attend_to_mask_tokens": True,
    }
    (folder / "artifact.metadata").write_text(json.dumps(settings, indent=2))
    return Computed(folder, encoder, weight, {"query": 20, "document": 30})


def is_pylate(model: Any) -> bool:
    """Return whether a model is PyLate's, which has other methods than sentence-transformers' own."""
    return type(model).__name__ == "ColBERT"


class Texts(NamedTuple):
    """The tokens of texts, and a tool's vectors of those that count."""

    ids: list[np.ndarray]
    vectors: list[np.ndarray]


def encode(model: Any, *, is_query: bool) -> Texts:
    """Return what PyLate or sentence-transformers makes of each text alone."""
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    for text in TEXTS:
        name = "query" if is_query else "document"
        if is_pylate(model):
            ids = model.tokenize([model.prompts[name] + text], is_query=is_query)["input_ids"]
            vectors = model.encode([text], is_query=is_query, prompt_name=name)
        else:
            ids = model.preprocess([text], prompt=model.prompts[name], task=name)["input_ids"]
            vectors = getattr(model, f"encode_{name}")([text], convert_to_numpy=True)
        rows.append((ids[0].numpy().astype(np.int32), np.asarray(vectors[0], np.float32)))
    return Texts(*(list(each) for each in zip(*rows, strict=True)))


def scores_of(model: Any, queries: Texts, documents: Texts) -> np.ndarray:
    """Return the tool's scores [query, document]."""
    if not is_pylate(model):
        return model.similarity(*([*map(torch.from_numpy, each.vectors)] for each in (queries, documents))).numpy()
    from pylate.scores import colbert_scores

    # One pair at a time: of several, PyLate pads the shorter ones with vectors of zeros, which may match best.
    return np.asarray(
        [
            [float(colbert_scores(query[None], document[None])) for document in documents.vectors]
            for query in queries.vectors
        ]
    )


def versions() -> dict[str, str]:
    """Return the versions of the packages that compute goldens."""
    installed = {package.metadata["Name"]: package.version for package in distributions()}
    return {name: installed[name] for name in PACKAGES if name in installed}


@torch.no_grad()
def make(name: str, case: Callable[[Path], Any], folder: Path) -> None:
    """Write one case."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = case(folder)
    queries, documents = (encode(model, is_query=is_query) for is_query in (True, False))
    arrays = {"texts": np.frombuffer(json.dumps(TEXTS).encode(), np.uint8)}
    for kind, texts in (("query", queries), ("document", documents)):
        for i in range(len(TEXTS)):
            arrays |= {f"{kind}_ids_{i}": texts.ids[i], f"{kind}_{i}": texts.vectors[i]}
    arrays["versions"] = np.frombuffer(json.dumps(versions()).encode(), np.uint8)
    np.savez_compressed(folder / "golden.npz", **arrays, scores=scores_of(model, queries, documents))
    (folder / "README.md").unlink(missing_ok=True)
    print(f"{name}: {sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()) // 1024} KB")


CASES = {
    "stanford": stanford,
    "pylate_modernbert": pylate_modernbert,
    "pylate_lfm2": pylate_lfm2,
    "pylate_long_queries": pylate_long_queries,
    "pylate_bert": pylate_bert,
    "pylate_roberta": pylate_roberta,
    "multi_vector": multi_vector,
    "jina": jina,
}

if __name__ == "__main__":
    run(__doc__, CASES, make, "late_interaction")
