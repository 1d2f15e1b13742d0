"""What cases of `train` were known by before edits that changed nothing of what is computed, by what they are now:
answers went into memory that a device reads itself, rows of a table came to be looked up by a part of the model,
and the check came to be told how often storing rounds. Of the cases of plans, and of some beside them.
"""

from __future__ import annotations

from collections.abc import Mapping

_NOW_AND_BEFORE = """
01d4ffbefc72:bd191bdbd057 089bfeed10eb:23d765a36876 0b2d6ff73f9a:14286eae4d71 0bd7dcc21338:060a4096c14e
11de85f84bd6:7ef5403c52e6 13fe82c76c66:0acf59109a9b 25bfd9a03ee9:45b0cb71c039 2cb47e62ea52:b9bbe3e9151d
3e9752a59aaa:72d55e79635d 4377da44cd24:d421b10a00cf 43db0efb8724:29040a752f0a 4eb89c14a3b7:4604d2fcef7e
51df0beee147:b3487f11adb6 56d3b5d23b90:211f619c2ceb 59d15512833c:b047a77915a8 5c14812dbc8c:0f22e853b438
5f8046589233:f9b38f240c26 649d17f61407:2febdbe34e72 683604c082e9:3c249fc9d129 732d2718f7cf:7dff780a7f40
73a31f34d09d:5273be20b5a6 78ef6b6c5e90:307657af66ae 8384f2a5b313:2b1c28bad66c 8c9de2ce54ed:6abfeade5c7f
8ef0d650d1ab:45dc516b7391 8f2fcb1f347f:51a8a0a18019 8f44a20d57b9:f33505ebf984 90e61115835e:aafed9257316
95897eab616c:773151a96aa0 9c0c34e2f552:a8b86f3e6704 a8d6c9cc1f49:ce2361d26871 ab5ebad7fb53:76185f23c7a8
abf6dc0cbf87:f60a9065aa87 b5ef0aa57a83:67530d0309f5 b8efdf6a3064:2783682723a9 b9a183aaac3a:08d04a2a3042
c53c54519dae:5d449b36a36d c95bcf3900ea:c13105f95efa d08a999b2f64:78c1f95cb7ce d34b2fe2c70b:e7857fb41bc1
d4fa990606a7:16c85a29e531 db451f83bee6:b8975f5da825 dbceba6761a1:c77aff095af5 dbec83624b11:1551c4773f9b
e4bcba95a16d:19817929d2de ec394245b7e0:74caaa1f699b f3d8c9f2a115:2a77d4fc05e3 fdbea01f24fe:e96ff41afac5
"""

CONTINUES: Mapping[str, str] = dict(pair.split(":") for pair in _NOW_AND_BEFORE.split())
