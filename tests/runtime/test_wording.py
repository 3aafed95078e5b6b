from gfgen.system.wording import counted


def test_one_thing_is_singular_and_large_numbers_have_commas():
    shown = [counted(number, "rank") for number in (0, 1, 2, 1200)]
    assert shown == ["0 ranks", "1 rank", "2 ranks", "1,200 ranks"]
