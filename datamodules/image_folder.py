"""`ImageFolder`: class folders of images (`ROOT/train/CLASS/*.jpg`, `ROOT/val/CLASS/*.jpg`) with timm's transforms."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor

from .base import SizedData, check_sizes
from .loading import ERRORS, Batch, EvalLoader, ResumableLoader, check_counts, generator, seed_everything

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".gif"})
# What PIL's decoders raise on damaged files.
READ_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    LookupError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
OnError = Literal["raise", "skip"]
Transform = Callable[[Image.Image], Tensor]
ATTEMPTS = 10  # other samples tried in place of a broken training image


@dataclass(frozen=True)
class ImageTransforms:
    """Augmentation and preprocessing, with the names and meanings of timm's `create_transform`.

    Args:
        scale: smallest and largest share of the area that a random crop takes.
        ratio: smallest and largest aspect of a random crop.
        crop_mode: "rrc" random resized crop, "rkrc" and "rkrr" keep the aspect.
        hflip: probability of a horizontal flip.
        color_jitter: strength of colour jitter; timm turns it off under RandAugment, not under "3a".
        auto_augment: policy, such as "rand-m9-mstd0.5-inc1" (RandAugment) or "3a" (DeiT III); None for no policy.
        reprob: probability of random erasing.
        remode: filling of erased pixels: "const", "rand" or "pixel".
        recount: how many rectangles are erased.
        train_interpolation: filter of training crops; "random" draws bilinear or bicubic.
        interpolation: filter in validation.
        crop_pct: share of the resized image's side that the centre crop of validation keeps.
        mean: of the three channels, subtracted.
        std: of the three channels, divided by.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    crop_mode: Literal["rrc", "rkrc", "rkrr"] = "rrc"
    hflip: float = 0.5
    color_jitter: float = 0.3
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    reprob: float = 0.25
    remode: Literal["const", "rand", "pixel"] = "pixel"
    recount: int = 1
    train_interpolation: str = "bicubic"
    interpolation: str = "bicubic"
    crop_pct: float = 0.9
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        for name in ("hflip", "reprob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"transforms.{name}={getattr(self, name)} is a probability: 0 to 1")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"transforms.scale={self.scale} must be shares of the area: 0 < smallest <= largest <= 1")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"transforms.crop_pct={self.crop_pct} must be above 0 and at most 1")

    def train(self, size: int) -> Transform:
        """The training transform for one size."""
        return create_transform(
            size,
            is_training=True,
            train_crop_mode=self.crop_mode,
            scale=self.scale,
            ratio=self.ratio,
            hflip=self.hflip,
            color_jitter=self.color_jitter,
            auto_augment=self.auto_augment,
            interpolation=self.train_interpolation,
            re_prob=self.reprob,
            re_mode=self.remode,
            re_count=self.recount,
            mean=self.mean,
            std=self.std,
        )

    def evaluate(self, size: int) -> Transform:
        """The validation transform for one size: resize, centre crop, normalise."""
        return create_transform(
            size, interpolation=self.interpolation, crop_pct=self.crop_pct, mean=self.mean, std=self.std
        )


DEFAULT_TRANSFORMS = ImageTransforms()


class ImageData(SizedData):
    """What `ImageFolder` and `ImageShards` share: sizes, transforms and the policy for broken samples."""

    in_chans = 3

    def __init__(
        self,
        image_size: int,
        eval_sizes: Sequence[int] | None,
        batch_size: int,
        eval_batch_size: int | None,
        num_workers: int,
        seed: int,
        transforms: ImageTransforms | Mapping[str, Any],
        on_error: OnError,
        max_errors: int,
    ) -> None:
        check_counts(image_size=image_size)
        super().__init__(batch_size, eval_batch_size, num_workers, seed, max_errors)
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error={on_error!r} must be 'raise' or 'skip'")
        self.image_size = image_size
        self.eval_sizes = check_sizes([image_size] if eval_sizes is None else eval_sizes)
        self.eval_names = [f"{size}px" for size in self.eval_sizes]
        self.transforms = ImageTransforms(**transforms) if isinstance(transforms, Mapping) else transforms
        self.on_error = on_error


class ImageFolder(ImageData):
    """Images in class folders, `ROOT/train/CLASS/...` and `ROOT/val/CLASS/...`; classes are sorted by name.

    Batches: {"image": (B, 3, S, S) float32, normalised, "label": (B,) int64}; in validation also "valid": (B,) bool.

    With `on_error="skip"` an unreadable training image is replaced by another one, drawn from the seed, and an
    unreadable validation image counts for nothing ("valid" is False). `skipped` holds the names and reasons.

    Args:
        root: the folder with `train` and `val`.
        image_size: side of the training images, in pixels.
        eval_sizes: sides of the validation images; one validation loader each, named "224px", ...; `image_size` alone
            when not given.
        batch_size: training images of one process in a step.
        eval_batch_size: images of one process in a validation step; `batch_size` when not given.
        num_workers: worker processes that read and augment; 0 does so in the training process.
        seed: of the order and of the augmentations.
        transforms: augmentation and preprocessing.
        on_error: what an unreadable image does: "raise" stops the run, "skip" counts it.
        max_errors: with "skip", more different unreadable images than this stop the run.
    """

    def __init__(
        self,
        root: str | Path,
        image_size: int = 224,
        eval_sizes: Sequence[int] | None = None,
        batch_size: int = 128,
        eval_batch_size: int | None = None,
        num_workers: int = 4,
        seed: int = 0,
        transforms: ImageTransforms = DEFAULT_TRANSFORMS,
        on_error: OnError = "raise",
        max_errors: int = 100,
    ) -> None:
        super().__init__(
            image_size, eval_sizes, batch_size, eval_batch_size, num_workers, seed, transforms, on_error, max_errors
        )
        root, transforms = str(root), asdict(self.transforms)  # type: ignore[assignment]  # plain values in checkpoints
        self.save_hyperparameters(logger=False)
        self.root = Path(root)
        self.classes, self._train = scan_classes(self.root / "train")
        val_classes, self._val = scan_classes(self.root / "val")
        check_same_classes(self.classes, val_classes, str(self.root / "train"), str(self.root / "val"))
        self.num_classes = len(self.classes)

    def make_train_loader(self, frozen: bool) -> ResumableLoader:
        size = self.image_size
        source = ImageFiles(self._train, self.transforms.train(size), size, self.seed, self.on_error, replace=True)
        return self._train_loader_of(source, frozen)

    def make_eval_loader(self, size: int) -> EvalLoader:
        source = ImageFiles(self._val, self.transforms.evaluate(size), size, self.seed, self.on_error, replace=False)
        return EvalLoader(source, self.eval_batch_size, self.num_workers, self.skipped)


def _hidden(path: Path, folder: Path) -> bool:
    """Whether a name below the folder starts with a dot: what systems and notebooks leave beside images is no image."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def scan_classes(
    folder: Path, suffixes: Collection[str] = IMAGE_SUFFIXES, kind: str = "image"
) -> tuple[list[str], list[tuple[Path, int]]]:
    """Sorted class names, and (file, class number) of every image below the class folders, sorted.

    Args:
        folder: the folder of class folders.
        suffixes: what the names of files end in, in lower case.
        kind: what the files are, for messages.

    Raises:
        FileNotFoundError: if there is no such folder, no class folder in it, or no image in a class folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: expected class folders with {kind}s in it, {folder / 'CLASS'}")
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        example = ".jpg" if kind == "image" else ".mp4"
        raise FileNotFoundError(f"no class folder in {folder}: expected {folder / 'CLASS'}/*{example}")
    files, empty = [], []
    for number, name in enumerate(classes):
        found = sorted(
            p
            for p in (folder / name).rglob("*")
            if p.suffix.lower() in suffixes and p.is_file() and not _hidden(p, folder)
        )
        files += [(path, number) for path in found]
        empty += [] if found else [name]
    if empty:
        raise FileNotFoundError(
            f"no {kind} in {len(empty)} of {len(classes)} class folders of {folder}: {few(empty)}; "
            f"searched for {' '.join(sorted(suffixes))}"
        )
    return classes, files


def check_same_classes(train: Sequence[str], val: Sequence[str], train_place: str, val_place: str) -> None:
    """Raise ValueError naming the classes that only one of two places has."""
    missing, extra = sorted(set(train) - set(val)), sorted(set(val) - set(train))
    if missing or extra:
        parts = [f"missing in {val_place}: {few(missing)}"] if missing else []
        parts += [f"only in {val_place}: {few(extra)}"] if extra else []
        raise ValueError(f"{train_place} and {val_place} must have the same classes; {'; '.join(parts)}")


def few(names: Sequence[str], most: int = 10) -> str:
    """The first names in one line, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class ImageFiles:
    """Labelled image files, each read and transformed under its own seed.

    Attributes:
        kind: what the files are, for messages.
        errors: what reading a damaged file raises.

    Args:
        files: (path, class number).
        transform: from a PIL image to a tensor.
        size: side of the transformed images.
        seed: of the transform's randomness, together with epoch and index.
        on_error: policy for unreadable files.
        replace: with "skip", put another sample in place of an unreadable one, otherwise mark it as not valid.
    """

    kind = "image"
    errors = READ_ERRORS

    def __init__(
        self,
        files: Sequence[tuple[Path, int]],
        transform: Callable[[Any], Tensor],
        size: int,
        seed: int,
        on_error: OnError,
        replace: bool,
    ) -> None:
        self.files, self.transform, self.size, self.seed = files, transform, size, seed
        self.on_error, self.replace = on_error, replace

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        errors: list[tuple[str, str]] = []
        samples = [self._sample(index, epoch, errors) for index in indices]
        return stack_samples(samples, errors, self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a transformed sample."""
        return 3, self.size, self.size

    def read(self, path: Path) -> Any:
        """What the transform takes, from a file."""
        return read_image(path)

    def _sample(self, index: int, epoch: int, errors: list[tuple[str, str]]) -> tuple[Tensor, int] | None:
        others = generator(self.seed, epoch, index, 1)
        for _ in range(ATTEMPTS if self.replace else 1):
            path, label = self.files[index]
            seed_everything(self.seed, epoch, index)
            try:
                sample = self.read(path)
            except self.errors as error:
                if self.on_error == "raise":
                    raise unreadable(str(path), error) from error
                errors.append((str(path), describe(error)))
            else:
                return self.transform(sample), label
            index = int(torch.randint(len(self), (), generator=others))
        if self.replace:
            raise ValueError(f"{ATTEMPTS} {self.kind}s drawn in a row are unreadable, the last {path}: {errors[-1][1]}")
        return None


def read_image(source: Any) -> Image.Image:
    """An RGB image from a path or a binary file object, wholly decoded."""
    with Image.open(source) as image:
        return image.convert("RGB")


def describe(error: BaseException) -> str:
    """Type and text of an error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def unreadable(name: str, error: BaseException) -> ValueError:
    """The error that the policy "raise" raises."""
    return ValueError(f"cannot read {name} ({describe(error)}); repair or remove it, or pass on_error='skip'")


def stack_samples(
    samples: Sequence[tuple[Tensor, int] | None], errors: list[tuple[str, str]], size: int | tuple[int, ...]
) -> Batch:
    """A batch of (image, label) pairs; None becomes a grey image of class 0 that is not valid.

    Args:
        samples: the pairs.
        errors: (name, reason) of what could not be read.
        size: side of the images, or shape of the samples.
    """
    blank = torch.zeros((3, size, size) if isinstance(size, int) else size)
    images = [blank if sample is None else sample[0] for sample in samples]
    labels = [0 if sample is None else sample[1] for sample in samples]
    batch: Batch = {"image": torch.stack(images), "label": torch.tensor(labels), ERRORS: errors}
    if any(sample is None for sample in samples):
        batch["valid"] = torch.tensor([sample is not None for sample in samples])
    return batch
