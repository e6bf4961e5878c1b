"""Small made-up data for the scripts, in the formats that they read."""

from __future__ import annotations

import json
import pickle
import random
import struct
from pathlib import Path

import numpy as np

WORDS = [a + b for a in ("ba", "do", "ki", "lu", "me") for b in ("n", "r", "s", "t", "x", "zu")]


def images(folder: Path) -> None:
    """Two classes of 32 images: light above or light below."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for part, count in (("train", 32), ("val", 8)):
        for label in range(2):
            place = folder / "images" / part / f"class{label}"
            place.mkdir(parents=True)
            for n in range(count):
                pixels = draw.integers(0, 120, (48, 48, 3), dtype=np.uint8)
                pixels[24 * label : 24 * label + 24] += 120
                Image.fromarray(pixels).save(place / f"{n}.png")


def photos(folder: Path) -> None:
    """Noise, in the folders of the Berkeley segmentation data set."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for part, count in (("train", 64), ("test", 8)):
        place = folder / "dataset" / "BSDS300" / "images" / part
        place.mkdir(parents=True)
        for n in range(count):
            Image.fromarray(draw.integers(0, 255, (48, 48, 3), dtype=np.uint8)).save(place / f"{n}.png")


def digits(folder: Path, train: int, test: int) -> None:
    """MNIST's files, with `train` and `test` images of ten patterns and noise. Every fifth label is drawn anew."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    draw = np.random.default_rng(0)
    patterns = draw.integers(0, 200, (10, 28, 28))
    for part, count in (("train", train), ("t10k", test)):
        shown = draw.integers(0, 10, count, dtype=np.uint8)
        labels = np.where(draw.random(count) < 0.2, draw.integers(0, 10, count, dtype=np.uint8), shown)
        pixels = (patterns[shown] + draw.integers(0, 55, (count, 28, 28))).astype(np.uint8)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + pixels.tobytes())


def digits_beside(folder: Path) -> None:
    """For a script that reads `../data`."""
    digits(folder.parent / "data", 128 * 60, 512)


def few_digits_beside(folder: Path) -> None:
    """The same, for a larger model."""
    digits(folder.parent / "data", 32 * 12, 64)


def digits_for_lightning(folder: Path) -> None:
    """Lightning's example wants 60,000 and looks for them in two places."""
    digits(folder / "data", 60_000, 1_000)
    (folder.parent.parent / "Datasets").symlink_to(folder / "data")


def digits_for_fabric(folder: Path) -> None:
    """Fabric's example looks three folders above its own."""
    digits(folder / "data", 32 * 60, 256)
    (folder.parent.parent.parent / "Datasets").symlink_to(folder / "data")


def words(folder: Path) -> None:
    """Texts in which each word tells most about the next."""
    for part, count in (("train", 16_000), ("valid", 2_000), ("test", 2_000)):
        place = folder / "words"
        place.mkdir(exist_ok=True)
        (place / f"{part}.txt").write_text(_text(random.Random(part), count))


def tokens(folder: Path) -> None:
    """Files of numbers of words, as nanoGPT reads them."""
    place = folder / "data" / "words"
    place.mkdir(parents=True)
    for part, count in (("train", 16_000), ("val", 2_000)):
        said = _text(random.Random(part), count).split()
        np.array([WORDS.index(word) for word in said], dtype=np.uint16).tofile(place / f"{part}.bin")
    (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(WORDS)}))


def sentences(folder: Path) -> None:
    """A tiny model with random weights, and sentences whose first word is their label."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    tiny = folder / "tiny"
    tiny.mkdir()
    (folder / "vocabulary").write_text("\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)))
    BertTokenizerFast(str(folder / "vocabulary")).save_pretrained(tiny)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertForSequenceClassification(BertConfig(vocab_size=len(WORDS) + 5, **size)).save_pretrained(tiny)
    draw = random.Random(0)
    lines = ["sentence,label"]
    for _ in range(16 * 60):
        said = [draw.choice(WORDS) for _ in range(8)]
        lines.append(f"{' '.join(said)},{WORDS.index(said[0]) % 2}")
    (folder / "train.csv").write_text("\n".join(lines) + "\n")


def text(folder: Path) -> None:
    """The configuration of a tiny GPT-2, a tokenizer of words, and a text."""
    from transformers import GPT2Config

    tiny = folder / "tiny"
    tiny.mkdir()
    words = _tokenizer(tiny, "<eos>")
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 1, "eos_token_id": 1}
    (tiny / "config.json").write_text(json.dumps(GPT2Config(vocab_size=words, **size).to_dict()))
    (folder / "train.txt").write_text(_text(random.Random(0), 16 * 16 * 60))


def documents(folder: Path) -> None:
    """A tokenizer of words, and documents. The script's folder is the package that the script imports."""
    (folder / "torchtitan").symlink_to(".")
    for name in ("tokenizer", "c4_test"):
        (folder / "tests" / "assets" / name).mkdir(parents=True)
    _tokenizer(folder / "tests" / "assets" / "tokenizer", "<bos>", "<eos>")
    lines = _text(random.Random(0), 160 * 16 * 40).splitlines()
    documents = (" ".join(lines[n : n + 10]) for n in range(0, len(lines), 10))
    (folder / "tests" / "assets" / "c4_test" / "data.json").write_text(
        "\n".join(json.dumps({"text": each}) for each in documents)
    )


def _tokenizer(folder: Path, *special: str) -> int:
    """Write a tokenizer of words, in Hugging Face's format; the number of its words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: n for n, word in enumerate(("<unk>", *special, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {f"{each.strip('<>')}_token": each for each in special}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **named).save_pretrained(folder)
    return len(vocabulary)


def _text(draw: random.Random, count: int) -> str:
    follows = {word: [WORDS[(5 * n + step) % len(WORDS)] for step in (1, 2, 7)] for n, word in enumerate(WORDS)}
    said = [WORDS[0]]
    while len(said) < count:
        said.append(draw.choice(follows[said[-1]]))
    return "\n".join(" ".join(said[n : n + 20]) for n in range(0, count, 20)) + "\n"
