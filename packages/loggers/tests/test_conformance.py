"""Every logger of this package passes the suite that authors of plug-ins inherit."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hocket.testkit import LoggerConformance
from hocket_loggers import TensorBoardLogger


class TestTensorBoard(LoggerConformance):
    def make(self):
        return TensorBoardLogger()

    def written(self, logger, folder):
        events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
        return {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
