"""What can be tuned in the policy that ships."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Options"]

_INFINITY = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Defaults were chosen in simulation; see `tokenflow sim`."""

    efficiency: float = 0.89
    """Share of the modelled capacity that is promised to readers."""
    keep_s: float = 1.1
    """One turn in memory: readers are to have a lead for those of others until theirs comes again."""
    loading_share: float = 0.5
    """Of the link to the device, what loads can count on beside evictions: turns are longer where memory is
    large for it, and streams come back earlier where many are needed at one time."""
    paused_share: float = 0.25
    """Of a paused reader's rate, what is kept for its return."""
    yields_s: float = 10.0
    """A newcomer who reads faster than a full batch writes lets others go first for so long: beside it the
    batch has to be small."""
    tail: float = 0.25
    """A stream is expected to run on for at least this share of what it has generated."""
    margin_s: float = 0.75
    """A stream is brought back this long before its reader runs dry (and its return has to be paid)."""
    late_s: float = 0.5
    """While loads start later than that by this much, as the link is busy, newcomers wait."""
    ahead_s: float = 0.5
    """A victim's reader has at least this much left to read when the victim could be back."""
    ahead_new_s: float = 1.1
    """The same for one that makes way for a newcomer or a machine: those who have begun come before them, and
    would find nobody ahead."""
    least_s: float = 0.7
    """A stream that came into the batch stays at least this long."""
    again_s: float = 1.0
    """One that came back more recently than this goes only if no other can: that is thrash."""
    again_steps: float = 40.0
    """No longer after so many decode steps: where they are fast its reader has text for long by then, and
    readers who run dry would find nobody else ahead."""
    starving_s: float = 20.0
    """A started stream that is dry after so long outside takes a place from whoever is ahead most. A newcomer
    as late as this no longer waits for loads."""
    stay_s: float = 2.0
    """One that came in so late stays this long before it makes way for another that starves."""
    patience_s: float = 10.0
    """A machine's stream waits this long for what readers leave; then it takes a place as a reader would."""
    lead_cap_s: float = _INFINITY
    """Above this lead a stream is parked while somebody waits outside. Off by default: it idles memory."""
    lead_cap_share: float = _INFINITY
    """The same, as a share of the answer's expected length."""
    tight_s: float = 0.5
    """Below this slack a running reader is tight: streams far ahead are parked to make steps shorter."""
    calm_s: float = 1.2
    """Above this slack a running stream may be parked to make steps shorter."""
    calm_refusing_s: float = 2.0
    """The same while newcomers are refused: a smaller batch makes fewer tokens, and they wait for those."""
    catch_up_s: float = 8.0
    """A shorter step must not cost what is read within this time: a smaller batch makes fewer tokens."""
    share: float = 0.7
    """Of the smallest slack in the batch, what one pass may take."""
    least_share: float = 1.0
    """Prefill gets at least this share of a decode step."""
    prefill_ahead_s: float = 0.3
    """Newcomers get places only as far as they can be prefilled within this time."""
    lead_s: float = 1.5
    """Newcomers wait for readers in the batch to get a lead that pays for their prefill, if that takes no
    longer than this."""
    hold_s: float = 3.0
    """Newcomers as late as this no longer wait for it, and memory is kept free for them."""
    no_lead_share: float = 0.75
    """Of what a stream gets with all in one batch, what a reader takes who never gets a lead worth a wait."""
    refill_s: float = 0.25
    """Streams that are not urgent come back only if the batch could grow for this long afterwards."""
    ample: float = 0.3
    """With nobody outside, and this share of the pool free, the engine is left alone."""
    ample_whole: float = 0.95
    """With this share of the pool enough for all answers to their ends, newcomers come in as they come."""
    most: int = 32
    """Streams of a kind considered for a place in one plan; the next plan goes on."""
    write_s: float = 0.5
    """The KV of streams that will have to leave within this time is copied to the host ahead."""
    poll_s: float = 0.25
    """With somebody waiting, plan at least this often."""
