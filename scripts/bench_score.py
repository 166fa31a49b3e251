"""Videos a second of scoring: a batch from memory against one video a call through an mp4 file.

The second is how public training code calls VideoAlign. Both use the same tiny random model and the same videos; the
model is so small that what is compared is the way, not the network.

    python scripts/bench_score.py --videos 16 --frames 33 --size 240 416
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from reward_models import save_videoalign

from sagecli import media
from sagecli.rewards.videoalign import VideoAlign
from sagecli.videofiles import probe, read_frames

FPS = 24.0


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The fastest of several calls, after one that warms up."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--videos", type=int, default=16)
    parser.add_argument("--frames", type=int, default=33)
    parser.add_argument("--size", type=int, nargs=2, default=[240, 416], metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    coarse = torch.rand(arguments.videos, 3, 4, 6, 10, generator=torch.Generator().manual_seed(0))
    size = (arguments.frames, *arguments.size)
    videos = torch.nn.functional.interpolate(coarse, size, mode="trilinear").transpose(1, 2)
    prompts = [f"a drifting cloud of colours, number {number}" for number in range(arguments.videos)]
    with tempfile.TemporaryDirectory() as folder:
        reward = VideoAlign(str(save_videoalign(Path(folder) / "model").folder))
        reward.load()

        def in_memory() -> None:
            for start in range(0, len(videos), arguments.batch):
                part = slice(start, start + arguments.batch)
                reward(videos[part], prompts[part], FPS)

        def through_files() -> None:
            for number, (video, prompt) in enumerate(zip(videos, prompts, strict=True)):
                file = Path(folder) / f"{number}.mp4"
                media.write_video(file, video, FPS)
                info = probe(file)
                frames = read_frames(file, reward.frames(info.num_frames, info.fps))
                reward.score(frames[None].float() / 255, [prompt], info.fps)

        rates = [len(videos) / seconds(call, arguments.repeats) for call in (in_memory, through_files)]
    print(f"in memory, batches of {arguments.batch}: {rates[0]:.1f} videos/s")
    print(f"through files, one a call:  {rates[1]:.1f} videos/s")
    print(f"ratio {rates[0] / rates[1]:.1f}")


if __name__ == "__main__":
    main()
