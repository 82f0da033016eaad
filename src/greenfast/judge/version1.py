"""Records of version 1, which have no digest, no exam and nothing that their noise floor can be drawn again from.

Whoever leaves these out of a newer record would have what it says believed, so only the kept ones are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from greenfast.judge.digest import digest_of


def is_kept(content: Mapping[str, Any]) -> bool:
    """Whether a file's content is one of the records of version 1 that greenfast keeps, as it was measured.

    What was built may differ: hashes are added to say that a record is of today's kernels.
    """
    measured = {
        name: {key: value for key, value in side.items() if key != "builds"}
        for name, side in content.items()
        if isinstance(side, dict) and "builds" in side
    }
    return digest_of({**content, **measured}) in _KEPT


#: ``digest_of`` them without what was built.
_KEPT = frozenset(
    {
        "19fcf99466b3b8a86e8a9f4485683f9635103eaad7fbe46144db1cd9952c9476",
        "27e5147c94ca5d3c0e0d106c4b8af232b36bc217f15e86b9f2824a6b2012fb87",
        "2e72d9dc4f7831b72d02890ef254110fb8b9c99f28d38a53fa2472e405075de5",
        "3294c8cef53c46efcf8c4ca7c468d7934a439d7d8f9c7d042675ee9256b4f4a4",
        "3dcd25e6b839b754ebad1f50c76e964cdaa18d77763cc305d69a44d241da5b10",
        "403c6fc2e3e7ae31b5ea6ed6788e54de0e304c8dd7435eafe527de3eff0863ae",
        "50fe64dd28d3980f9209514168fd8095aeccff610f62bb1bb42b78fc16a547cf",
        "5a930b2c73200699e590010ae55d5515824e34d760d4f07765655ada167de4cf",
        "6b3b7376c8b6bc7a80f18441fe22f93ac26966f82dc28ee815a19f5301f6de25",
        "7f8c0f94e112ea436b2d9d01df6a515634504baea00064113f6251a86e9d6cd6",
        "8708a363615be2933773ff4bc6d80b4c3749320583cff2ed031ca0989701379f",
        "8750f3e35c22dfbebd73876b9c80afdcf674ee43d643ba44f2dc85387ebeab36",
        "9055227c176b2bcea348221936dff98f60ac3eb2e3c99a6d559aa8cde9b6a693",
        "9630c97030b54c4b2047b8e61d7728d31e1965f532a289a81eed3174843ffe55",
        "9940525e25393a6841550db07a133fce27ae08390365f1320aaa6666c575be8e",
        "9bad26450cc248d57b98f92dd6f36fa630351594131e7fab911707a3633ef91a",
        "9f62e5ad0a00998651c7a88744f0fa0a273d9d59fd7d8af60ab94c6f8e21cedb",
        "a9b159a2e683cdd0d18398e03c24723e6f56e24961e4b9b9f22d1c00d8c274eb",
        "af2f0a7f9e891a254985f9dc01ae7c8b932339a9fab9726f4f2eeb97da8f35ac",
        "b762c0f204a2d4d14faca415a15a9d3c81b602ba6a3e3b9999fa1466fb5db7ce",
        "c4baa4bcaf3e8029c3444609c0cdb1bcedc27254f709bc368074160a709c9c34",
        "cf3b9d22e115783463df3f0ee4dd5de6279df9c8f5608bfb419eab098ac1ccac",
        "cff1ad6d1397926bd5ac75dae1c7af06ebf89c7e595633747a6df91bad54cb6a",
        "d261e98609683cd5a80c378caa20f70da1fd3e640b688ddc82d5f365c25c352b",
        "d3393d6a81b4a66b849128c2ff4d40cb90ca531ae791db204ddc5d5851e0e40d",
        "e39b5608aadbb0ec867716ae1cb4a8a8db41ef87a1efdccb830ff7344b6fa736",
        "e86cf4abffa93599a680044e3ba4169c9f7b1d99a1e96dc61fbf1b36e6dfa50a",
        "f58559237b24b702d81cc3ca7bdf30efe7a1747e89c2a99ffb465818c1524c07",
        "f83f389094d0b4813cf1a19ba566a23da21f13009b1f446a17b3d81f9aa0ef9b",
        "fcc20d9a78c9b4e90791459ac4c39b04f94a272ff7679b1728f6844b68806226",
        "fee1038f9b0177abe8c57363ad23664ac9963cb593d9338f6d449e3f2ac3d31d",
    }
)
