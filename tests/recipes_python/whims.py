"""Three models that leave, drop and take back by whim: as a number says that a request's parameters, the
model and the request's length give.  What ``send`` and ``receive`` saw of each request is noted."""

from tokenflow import BaseRouter, PeerReq, Recipe

SMALL = "../../recipes/demo/small"
NAMES = ("a", "b", "c")
SEEN = {}


def number(*parts):
    """A pseudo-random whole number from 0 to 65,535."""
    mixed = 12345
    for part in parts:
        mixed = (mixed * 1_000_003 + int(part) * 7919 + 1) % 2**32
    return mixed * 2_654_435_761 % 2**32 >> 16


def destination(whim, code, position, token, leave):
    """Where a request goes after a token; its own code, and 0, say that it stays."""
    drawn = number(whim, code, position, token)
    return 0 if drawn % int(leave) else 1 + drawn // int(leave) % len(NAMES)


def drops(whim, code, length, drop):
    """Whether the sampled token, which would be the last of so many, is left to the peer."""
    return number(whim, code, length, 1) % int(drop) == 0


def taken_back(whim, code, length, back):
    """How many tokens a model takes back of a request that it is given."""
    return number(whim, code, length, 2) % int(back + 1)


class Whimsical(BaseRouter):
    def route(self, result):
        rows = zip(result.position.tolist(), result.next_token_ids.tolist(), strict=True)
        return [destination(self.whim, self.index, *row, self.leave) for row in rows]

    def send(self, req):
        self.note("send", req, req.peer)
        message = req.drop_last() if drops(self.whim, self.index, len(req), self.drop) else req.keep()
        self.note_message(message)
        return message

    def receive(self, peer_req):
        self.note_message(peer_req)
        back = taken_back(self.whim, self.index, peer_req.loc, self.back)
        loc = max(peer_req.loc - back, 4)
        if not back:
            return None
        return PeerReq(peer_req.rid, peer_req.token_ids[: max(loc - peer_req.base, 0)], loc)

    def note(self, role, req, peer):
        written = [*req.origin_input_ids, *req.output_ids]
        SEEN.setdefault(self.whim, []).append((role, self.index, peer, written, list(req.peer_locs[1:])))

    def note_message(self, message):
        SEEN[self.whim].append((self.index, list(message.token_ids), message.base, message.loc))


whims = Recipe("whims", entry="a", rollback=4, params={"whim": 0, "leave": 3, "drop": 3, "back": 2})
for name in NAMES:
    whims.model(name, SMALL, router=Whimsical)
