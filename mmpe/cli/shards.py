"""`mmpe shards make FOLDER OUT`: webdataset shards from class folders of images."""

from __future__ import annotations

from ._arguments import Parser, parser


def main(command: str, argv: list[str]) -> int:
    """Write the shards, or go on with an unfinished set."""
    args = _parser(command).parse_args(argv)
    from mmpe.datamodules.shard_writer import make_shards

    for index in make_shards(args.folder, args.out, args.samples_per_shard, seed=args.seed, workers=args.workers):
        print(index)
    return 0


def _parser(command: str) -> Parser:
    p = parser(command, "Shards of images, to be read as a stream by mmpe.datamodules.ImageShards.")
    actions = p.add_subparsers(dest="action", required=True, metavar="make", parser_class=Parser)
    make = actions.add_parser("make", help="write shards from class folders; a repeated call goes on where one stopped")
    make.add_argument("folder", help="class folders with images, or train and val with class folders in them")
    make.add_argument("out", help="where the shards go")
    make.add_argument("--samples-per-shard", type=int, default=1000, metavar="N", help="images in a shard")
    make.add_argument("--seed", type=int, default=0, help="seed of the order of the images")
    make.add_argument("--workers", type=int, default=4, metavar="N", help="threads that write")
    return p
