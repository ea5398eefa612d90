"""Error feedback: what an encoding dropped from a merged contribution is added to the next one of that fragment.

    sent = encode(delta + e)              e = 0 to begin with
    e   <- delta + e - decode(sent)       once the round was committed with this contribution in it

So the sum of what was merged is the sum of the deltas less the newest e, whatever the number of rounds: errors of an
encoding do not add up. This is right because the merged fragment overwrites the learner's own: what was not said is in
no parameter any more, and can be said again without counting twice.

- `carry` keeps the steps since the copy, and what was dropped is older than the copy: as with overwriting.
- `blend` keeps a share alpha of the learner's own value. What it sends next differs by at most the share
  alpha * (outer learning rate) * (weight of this learner) of e from what would make up for e: the model brings so much
  back by itself, and nobody subtracts it.
- A contribution that was not merged (late, refused, the round abandoned) leaves e as it was: the steps of an abandoned
  round are in the next delta, and those of a late one are lost by the rule for late ones.
- Where nobody said what became of it (a connection broke), e becomes 0: an error may be lost, and is never sent twice.
- A new incarnation, and with it every new timeline, begins with e = 0; so does a recovery. Their parameters are
  published versions, to which the steps that e belongs to never led.

Source of the idea: Seide et al., "1-bit stochastic gradient descent" (2014); here for deltas of rounds.
"""

from __future__ import annotations

import numpy as np

from decoupled_diloco.arrays.encoding import Encoded, FloatVector


class ErrorFeedback:
    """What was dropped, by fragment, for one incarnation. Used by one thread; its vectors are never written to.

    Memory: a float32 vector for each fragment that was merged, and another one while a round of it is under way.
    """

    def __init__(self) -> None:
        self._dropped: dict[int, FloatVector] = {}
        self._unsettled: dict[int, tuple[int, FloatVector]] = {}

    def carried(self, round_number: int, fragment: int) -> FloatVector | None:
        """What to add to the delta of this fragment in this round; None: nothing.

        May be asked again for the same round, for example by a syncer that was started again.
        """
        earlier, _ = self._unsettled.get(fragment, (round_number, None))
        if earlier != round_number:
            self._unsettled.pop(fragment)
            self._dropped.pop(fragment, None)
        return self._dropped.get(fragment)

    def sent(self, round_number: int, fragment: int, dropped: FloatVector) -> None:
        """A contribution goes out, of which the encoding dropped this. It counts once `settle` says that it was merged.

        Args:
            round_number: its round; of several contributions to one round, the last one counts.
            fragment: which.
            dropped: what `dropped_by` returned. Kept.
        """
        self._unsettled[fragment] = (round_number, dropped)

    def settle(self, round_number: int, fragment: int, is_merged: bool) -> None:
        """A round has closed.

        Args:
            round_number: which.
            fragment: the fragment that it synchronised.
            is_merged: whether it was committed with this learner's contribution in it.
        """
        number, dropped = self._unsettled.get(fragment, (None, None))
        if number != round_number:
            return
        del self._unsettled[fragment]
        if is_merged and dropped is not None:
            self._dropped[fragment] = dropped

    def forget(self) -> None:
        """The parameters were taken anew from the run."""
        self._dropped.clear()
        self._unsettled.clear()


def dropped_by(encoding: str, payload: memoryview, delta: FloatVector) -> FloatVector:
    """What the encoding dropped: delta - decode(payload), in a new float32 vector. Takes CPU time.

    Args:
        encoding: how the payload is written.
        payload: the encoded delta.
        delta: what was encoded.
    """
    decoded = Encoded(payload, encoding, delta.size).decode()
    return np.subtract(delta, decoded, out=decoded)
