"""Common data sets, distributed over several processes and resumed. docs/user/executor-inside.md shows these classes."""

import collections
import io
import tarfile
from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

from penstock_executor.training.batches import BatchSize
from penstock_executor.training.loader import Loader

SIZE = 53


class HuggingFaceStream:
    """An iterable data set of Hugging Face."""

    def __init__(self, dataset) -> None:
        self.dataset = dataset

    def stream(self, epoch: int, start: int):
        return iter(self.dataset.shuffle(seed=epoch, buffer_size=16).skip(start))


class WebDatasetStream:
    """Shards of WebDataset: the order is that of the shards, samples travel undecoded."""

    def __init__(self, shards: list[str]) -> None:
        self.shards = shards

    def stream(self, epoch: int, start: int):
        import webdataset

        turned = self.shards[epoch % len(self.shards) :] + self.shards[: epoch % len(self.shards)]
        return islice(webdataset.WebDataset(turned, shardshuffle=False), start, None)

    def decode(self, item):
        return {"number": int(item["number"])}


def hugging_face(tmp_path: Path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    return datasets.Dataset.from_dict({"number": list(range(SIZE))})


def stream_of_hugging_face(tmp_path: Path):
    return HuggingFaceStream(hugging_face(tmp_path).to_iterable_dataset(num_shards=4))


def web_dataset(tmp_path: Path):
    pytest.importorskip("webdataset", reason="webdataset is not installed")
    numbers, shards = iter(range(SIZE)), []
    for shard in range(4):
        shards.append(str(tmp_path / f"{shard}.tar"))
        with tarfile.open(shards[-1], "w") as tar:
            for number in islice(numbers, 14):
                content = str(number).encode()
                member = tarfile.TarInfo(f"{number:06d}.number")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return WebDatasetStream(shards)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [hugging_face, stream_of_hugging_face, web_dataset])
def test_stopped_in_the_middle_and_on_with_other_processes_each_sample_is_seen_once(tmp_path: Path, make):
    dataset = make(tmp_path)
    seen: collections.Counter[int] = collections.Counter()
    for position, most_steps, processes in ((0, 2, 2), (16, 3, 3), (40, 99, 1)):
        for rank in range(processes):
            loader = Loader(
                dataset,
                BatchSize(total=8, atomic=3),
                (rank, processes),
                seed=0,
                shuffle=True,
                drop_last=False,
                position=position,
                before_part=lambda last: None,
            )
            loader.epoch = 1
            done = 0
            for batch in loader:
                part = loader.take()
                seen.update(batch["number"].tolist()[: part.samples])
                done += part.last
                if done == most_steps:
                    break
    assert seen == collections.Counter(range(SIZE))
