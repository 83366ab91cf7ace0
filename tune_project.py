
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        if len(inputs) > 11:
            raise torch.OutOfMemoryError(f"{len(inputs)} samples")
        return inputs * self.w

def data():
    return [(torch.full((8, 1), 2.0), torch.zeros(8, 1))] * 10

def flat(outputs, targets):
    return 0 * outputs.sum()
