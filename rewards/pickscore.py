"""PickScore (arXiv 2305.01569): exp(logit_scale) * cos(prompt, frame) / 26, of a CLIP model trained on people's picks.

The mean over frames spread evenly; the division is METHOD.md section 7's convention.
"""

from collections.abc import Sequence

from torch import Tensor

from sagecli.config_base import Count
from sagecli.rewards import Scores
from sagecli.rewards.clip import ClipReward, Dtype

MODEL = "yuvalkirstain/PickScore_v1"
PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


class PickScore(ClipReward):
    """PickScore. Details: the cosine, the model."""

    axes = ("PickScore",)

    def __init__(self, path: str = MODEL, processor: str = "", frames: Count = 8, dtype: Dtype = "float32") -> None:
        """path: the model's folder or hub id; processor: its tokenizer and image processor, by default LAION's, from
        which PickScore was trained, or those of a path of your own. UserError for missing files.
        """
        super().__init__(path, processor or (PROCESSOR if path == MODEL else path), frames, dtype)

    def score(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Scores:
        """Scores of videos [B, n, 3, H, W] in [0, 1]."""
        cosine = self.cosines(videos, prompts)
        scores = self.network.logit_scale.float().exp() * cosine / 26
        details = [{"raw": {"PickScore": value}, "model": str(self.folder.resolve())} for value in cosine.tolist()]
        return Scores({"PickScore": scores}, {}, details, self.cut(prompts))
