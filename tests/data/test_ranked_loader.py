import pytest
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerFast

from dmc.data import RankedLoader, StreamingPacked, TextSource


def test_loader_goes_on_where_it_stood(corpus, tokenizer: PreTrainedTokenizerFast):
    def loader():
        return RankedLoader(StreamingPacked(TextSource(str(corpus)).stream(), tokenizer, 16), batch_size=2)

    first = loader()
    batches = iter(first)
    for _ in range(3):
        next(batches)
    state = first.state_dict()
    assert len(state["ranks"]) == 1
    second = loader()
    second.load_state_dict(state)
    assert [batch["index"].tolist() for batch in second] == [batch["index"].tolist() for batch in batches]


def test_another_number_of_ranks_is_refused(corpus, tokenizer: PreTrainedTokenizerFast):
    stream = StreamingPacked(TextSource(str(corpus)).stream(), tokenizer, 16)
    state = StatefulDataLoader(stream, batch_size=2).state_dict()
    with pytest.raises(ValueError, match="places of 2 ranks in the stream, 1 are running"):
        RankedLoader(stream, batch_size=2).load_state_dict({"ranks": [state, state]})
