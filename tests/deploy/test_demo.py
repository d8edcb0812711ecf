import numpy as np

from deploy.demo import metric_lines, similarity_lines


def test_similarities_stand_in_columns_under_their_number() -> None:
    lines = similarity_lines(("one", "another"), np.array([[2.0, 0.0], [0.0, 0.5]], np.float32))
    assert lines == [
        "cosine          1      2",
        "1  one       1.00   0.00",
        "2  another   0.00   1.00",
    ]


def test_metrics_are_shown_without_buckets_zeros_and_strangers() -> None:
    page = "\n".join(
        (
            "# HELP mhsa_tokens_total Tokens computed; nothing is padded.",
            'mhsa_tokens_total{model="m",version="1"} 136.0',
            'mhsa_requests_total{code="OK",method="Encode"} 1.0',
            'mhsa_requests_total{code="INTERNAL",method="Encode"} 0.0',
            'mhsa_batch_tokens_bucket{le="1.0",model="m",version="1"} 3.0',
            'mhsa_batch_tokens_sum{model="m",version="1"} 136.0',
            "process_open_fds 12.0",
        )
    )
    assert metric_lines(page) == [
        'mhsa_tokens_total{model="m",version="1"} 136.0',
        'mhsa_requests_total{code="OK",method="Encode"} 1.0',
        'mhsa_batch_tokens_sum{model="m",version="1"} 136.0',
    ]
