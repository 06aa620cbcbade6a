//! What processes print: taps and the aggregator, with random lines, ranks, pieces and times.

use mesh_proto::logs::{Aggregator, Chunk, Found, Line, LogOptions, Stream, TAIL_LINES, Tap};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::time::Duration;

const WINDOW: Duration = Duration::from_secs(3);
const OPTIONS: LogOptions = LogOptions { shown: true, alike: false, window: WINDOW, level: 20 };
/// Numbers make no difference.
const ALIKE: LogOptions = LogOptions { alike: true, ..OPTIONS };

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn line<'a>(rank: u32, point: &'a str, text: &'a str) -> Line<'a> {
    let (name, host) = (b"t".as_slice(), b"".as_slice());
    let (point, text) = (point.as_bytes(), text.as_bytes());
    Line { stream: Stream::Out, level: 0, name, rank, point, host, text, record: b"", alone: false }
}

fn mesh_with(procs: u32, options: LogOptions) -> Aggregator {
    let mut aggregator = Aggregator::new(options);
    aggregator.introduce(1, procs, options);
    aggregator
}

fn mesh_of(procs: u32) -> Aggregator {
    mesh_with(procs, OPTIONS)
}

fn say(aggregator: &mut Aggregator, rank: u32, text: &str, now: Duration) {
    aggregator.line(1, &line(rank, &format!("gpus={rank}"), text), now);
}

fn text(chunks: Vec<Chunk>) -> Vec<String> {
    let all: Vec<u8> = chunks.into_iter().flat_map(|chunk| chunk.text).collect();
    String::from_utf8(all).unwrap().lines().map(str::to_owned).collect()
}

/// `[t gpus=0-2,5 x4] step 1` as its ranks and its text; fails on anything else.
fn parse(shown: &str) -> (Vec<u32>, String) {
    let (label, text) = shown.strip_prefix("[t gpus=").unwrap().split_once("] ").unwrap();
    let (list, count) = label.split_once(" x").unwrap_or((label, "1"));
    let mut ranks = Vec::new();
    for run in list.split(',') {
        let (from, to) = run.split_once('-').unwrap_or((run, run));
        ranks.extend(from.parse::<u32>().unwrap()..=to.parse().unwrap());
    }
    assert_eq!(ranks.len(), count.parse::<usize>().unwrap(), "{shown}");
    (ranks, text.to_owned())
}

#[test]
fn the_first_is_shown_soon_and_the_rest_at_the_windows_end() {
    let mut aggregator = mesh_with(8, ALIKE);
    for (rank, at) in [(3, 0), (0, 20), (1, 90), (2, 500), (7, 2000)] {
        aggregator.tick(ms(at));
        say(&mut aggregator, rank, &format!("loss is 0.{rank}"), ms(at));
        if at == 90 {
            assert_eq!(aggregator.deadline(), Some(ms(100)));
            assert!(aggregator.take().is_empty());
        }
    }
    assert_eq!(text(aggregator.take()), ["[t gpus=0-1,3 x3] loss is 0.3 (and 2 alike, other numbers)"]);
    assert_eq!(aggregator.deadline(), Some(ms(3000)));
    aggregator.tick(ms(2999));
    assert!(aggregator.take().is_empty());
    aggregator.tick(ms(3000));
    assert_eq!(text(aggregator.take()), ["[t gpus=2,7 x2] loss is 0.2 (and 1 alike, other numbers)"]);
    assert_eq!(aggregator.deadline(), None);
}

#[test]
fn who_waits_for_a_result_sees_held_lines_at_once_and_counted_ones_go_on_being_counted() {
    let mut aggregator = mesh_of(3);
    assert!(aggregator.is_quiet(1), "nothing waits");
    for rank in [0, 2] {
        say(&mut aggregator, rank, "step 1", ms(0));
    }
    assert!(!aggregator.is_quiet(1));
    aggregator.release(2);
    assert!(aggregator.take().is_empty(), "that was another mesh");
    aggregator.release(1);
    assert!(aggregator.is_quiet(1));
    assert_eq!(text(aggregator.take()), ["[t gpus=0,2 x2] step 1"]);
    say(&mut aggregator, 1, "step 1", ms(10));
    assert!(aggregator.is_quiet(1), "it is counted");
    // LOG-2: the second of its rank is a line of its own.
    say(&mut aggregator, 0, "step 1", ms(20));
    aggregator.release(1);
    assert_eq!(text(aggregator.take()), ["[t gpus=0] step 1"]);
    aggregator.tick(ms(3000));
    assert_eq!(text(aggregator.take()), ["[t gpus=1] step 1"]);
}

#[test]
fn a_finished_traceback_need_not_wait_for_another_and_an_unfinished_line_goes_on_waiting() {
    let mut tap = Tap::new(0);
    let mut lines = Vec::new();
    let mut found = |found: Found<'_>| {
        if let Found::Line(line) = found {
            lines.push(String::from_utf8(line.text.to_vec()).unwrap());
        }
    };
    tap.feed(Stream::Err, b"Traceback (most recent call last):\n  File \"a\", line 1\n", ms(0), &mut found);
    tap.release(&mut found);
    assert!(tap.is_quiet(), "its exception is still to come");
    tap.feed(Stream::Err, b"ValueError: x\nbegun", ms(1), &mut found);
    assert!(!tap.is_quiet());
    tap.release(&mut found);
    assert!(tap.is_quiet());
    assert_eq!(lines, ["Traceback (most recent call last):\n  File \"a\", line 1\nValueError: x"]);
}

#[test]
fn only_equal_lines_become_one() {
    let mut aggregator = mesh_of(4);
    for rank in 0..4 {
        say(&mut aggregator, rank, &format!("loss of rank {rank} is 0.{rank}"), ms(0));
        say(&mut aggregator, rank, "step 1", ms(0));
    }
    aggregator.tick(ms(100));
    // LOG-7.
    let mut expected: Vec<String> = (0..4).map(|n| format!("[t gpus={n}] loss of rank {n} is 0.{n}")).collect();
    expected.insert(1, "[t gpus=0-3 x4] step 1".to_owned());
    assert_eq!(text(aggregator.take()), expected);
}

#[test]
fn lines_that_belong_together_are_one_or_none() {
    let mut aggregator = mesh_of(3);
    for (rank, said) in [(0, "Traceback\n\nE: 1"), (1, "Traceback\n\nE: 2"), (2, "Traceback\n\nE: 1")] {
        say(&mut aggregator, rank, said, ms(0));
    }
    aggregator.flush();
    let shown = text(aggregator.take());
    let both = ["[t gpus=0,2 x2] Traceback", "[t gpus=0,2 x2]", "[t gpus=0,2 x2] E: 1"];
    let one = ["[t gpus=1] Traceback", "[t gpus=1]", "[t gpus=1] E: 2"];
    assert_eq!(shown, [both, one].concat());
}

#[test]
fn what_stands_by_itself_keeps_its_place() {
    let mut aggregator = mesh_of(2);
    let alone = |rank| Line { alone: true, ..line(rank, "", "mesh: stopped") };
    // Nothing waits, so it is shown at once.
    aggregator.line(1, &alone(0), ms(0));
    assert_eq!(text(aggregator.take()), ["[t] mesh: stopped"]);
    say(&mut aggregator, 1, "before", ms(0));
    for rank in [1, 0, 1] {
        aggregator.line(1, &alone(rank), ms(1));
    }
    assert!(aggregator.take().is_empty());
    aggregator.tick(ms(101));
    assert_eq!(text(aggregator.take())[1..], ["[t] mesh: stopped"; 3]);
}

#[test]
fn records_come_with_their_text() {
    let mut aggregator = mesh_of(2);
    let logged = |rank| Line { record: b"{}", ..line(rank, "gpus=0", "INFO x") };
    let ranks = |chunk: &Chunk| chunk.records.iter().map(|record| record.rank).collect::<Vec<_>>();
    say(&mut aggregator, 0, "INFO x", ms(0));
    for rank in [0, 1] {
        aggregator.line(1, &logged(rank), ms(0));
    }
    aggregator.tick(ms(100));
    let chunks = aggregator.take();
    assert_eq!(chunks.iter().map(ranks).collect::<Vec<_>>(), [vec![], vec![0, 1]]);
    assert_eq!(text(chunks), ["[t gpus=0] INFO x", "[t gpus=0-1 x2] INFO x"]);
    // Whoever takes them one by one gets them at once.
    aggregator.hand_on_records(true);
    for rank in [0, 1] {
        aggregator.line(1, &logged(rank), ms(200));
    }
    assert_eq!(aggregator.take().iter().map(ranks).collect::<Vec<_>>(), [vec![0], vec![1]]);
    let large = vec![b'x'; 1 << 20];
    for rank in 0..100 {
        say(&mut aggregator, 0, &format!("line {rank}"), ms(300));
        aggregator.line(1, &Line { record: &large, ..logged(0) }, ms(300));
    }
    // LOG-3: those that would not fit were handed on.
    assert!(aggregator.take().len() > 190);
}

#[test]
fn one_process_alone_does_not_wait() {
    let mut aggregator = mesh_of(1);
    aggregator.line(1, &line(0, "", "hello"), ms(0));
    aggregator.line(1, &line(0, "", "hello"), ms(1));
    aggregator.line(1, &line(0, "", ""), ms(1));
    assert_eq!(text(aggregator.take()), ["[t] hello", "[t] hello", "[t]"]);
    assert_eq!(aggregator.deadline(), None);
}

#[test]
fn levels_streams_and_hosts() {
    let mut aggregator = mesh_of(1);
    for (level, stream, host) in [
        (0, Stream::Out, "a"),
        (10, Stream::Err, "a"),
        (20, Stream::Err, "a"),
        (0, Stream::Err, "b"),
        (0, Stream::Out, "a"),
    ] {
        let said = Line { level, stream, host: host.as_bytes(), ..line(0, "gpus=0", "x") };
        aggregator.line(1, &said, ms(0));
    }
    let chunks = aggregator.take();
    let shown: Vec<(Stream, &str)> =
        chunks.iter().map(|chunk| (chunk.stream, std::str::from_utf8(&chunk.text).unwrap())).collect();
    assert_eq!(
        shown,
        [
            (Stream::Out, "[t gpus=0] x\n"),
            (Stream::Err, "[t gpus=0] x\n[t gpus=0 on b] x\n"),
            (Stream::Out, "[t gpus=0 on a] x\n"),
        ]
    );
    aggregator.set(1, LogOptions { shown: false, ..OPTIONS });
    say(&mut aggregator, 0, "x", ms(0));
    assert!(aggregator.take().is_empty());
}

#[test]
fn ranks_of_several_dimensions_are_numbers() {
    let mut aggregator = mesh_of(4);
    for rank in 0..3 {
        aggregator.line(1, &line(rank, &format!("hosts={},gpus={}", rank / 2, rank % 2), "x"), ms(0));
    }
    aggregator.line(1, &line(3, "hosts=1,gpus=1", "y"), ms(0));
    aggregator.flush();
    assert_eq!(text(aggregator.take()), ["[t 0-2 x3] x", "[t hosts=1,gpus=1] y"]);
}

#[test]
fn memory_is_bounded() {
    let mut aggregator = mesh_of(2);
    let words: Vec<String> = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"].map(str::to_owned).into();
    let mut shown = 0;
    for n in 0..40_000_usize {
        let text: Vec<&str> = format!("{n:05}").bytes().map(|d| words[usize::from(d - b'0')].as_str()).collect();
        say(&mut aggregator, 0, &text.concat(), ms(0));
        shown += aggregator.take().iter().map(|c| c.text.iter().filter(|b| **b == b'\n').count()).sum::<usize>();
    }
    // LOG-3: all but the newest were shown early.
    assert!(shown >= 40_000 - 8192, "{shown}");
    aggregator.flush();
    assert_eq!(shown + text(aggregator.take()).len(), 40_000);
}

proptest! {
    /// LOG-2 and completeness: every line of every rank is shown or counted, once, with a similar one; a rank's earlier
    /// line is never counted after a later one.
    #[test]
    fn every_line_is_counted_once(
        said in prop::collection::vec((0..5_u32, 0..3_usize, 0..100_u32, 0..900_u64), 0..80),
        flush_at in prop::option::of(0..80_usize),
        alike in any::<bool>(),
    ) {
        let kinds = ["step", "loss is", "epoch"];
        let mut aggregator = mesh_with(5, if alike { ALIKE } else { OPTIONS });
        let mut now = ms(0);
        let mut expected: BTreeMap<(u32, &str), usize> = BTreeMap::new();
        let mut shown = Vec::new();
        for (at, (rank, kind, number, pause)) in said.iter().enumerate() {
            now += ms(*pause);
            aggregator.tick(now);
            say(&mut aggregator, *rank, &format!("{} {number}", kinds[*kind]), now);
            *expected.entry((*rank, kinds[*kind])).or_default() += 1;
            if flush_at == Some(at) {
                aggregator.flush();
                prop_assert_eq!(aggregator.deadline(), None);
            }
            shown.extend(text(aggregator.take()));
            // Nothing waits longer than the window.
            prop_assert!(aggregator.deadline().is_none_or(|at| at > now && at <= now + WINDOW));
        }
        aggregator.tick(now + WINDOW);
        prop_assert_eq!(aggregator.deadline(), None);
        shown.extend(text(aggregator.take()));
        let mut seen: BTreeMap<(u32, &str), usize> = BTreeMap::new();
        for line in &shown {
            let (ranks, text) = parse(line);
            let kind = kinds.into_iter().find(|kind| text.starts_with(kind)).unwrap();
            let mut distinct = ranks.clone();
            distinct.dedup();
            prop_assert_eq!(&distinct, &ranks);
            for rank in ranks {
                *seen.entry((rank, kind)).or_default() += 1;
            }
        }
        prop_assert_eq!(seen, expected);
    }

    /// LOG-1: what only one rank writes arrives whole and in order, whatever the others do.
    #[test]
    fn a_rank_alone_keeps_its_order(pauses in prop::collection::vec(0..500_u64, 1..60), ranks in 1..9_u32) {
        let mut aggregator = mesh_of(ranks);
        let mut now = ms(0);
        for (n, pause) in pauses.iter().enumerate() {
            now += ms(*pause);
            aggregator.tick(now);
            say(&mut aggregator, 0, &format!("line {n}"), now);
        }
        aggregator.forget(1);
        let expected: Vec<String> = (0..pauses.len()).map(|n| format!("[t gpus=0] line {n}")).collect();
        prop_assert_eq!(text(aggregator.take()), expected);
    }

    /// Lines do not depend on the pieces in which their bytes are read.
    #[test]
    fn a_tap_is_blind_to_how_it_is_fed(
        lines in prop::collection::vec("[a-z\\x1e\\x1f\r ]{0,12}", 0..20),
        cuts in prop::collection::vec(1..9_usize, 1..40),
        end in any::<bool>(),
    ) {
        let mut bytes = lines.join("\n").into_bytes();
        if end {
            bytes.push(b'\n');
        }
        let found = |pieces: &mut dyn Iterator<Item = &[u8]>| {
            let mut tap = Tap::new(0);
            let mut out = Vec::new();
            let mut take = |found: Found<'_>| if let Found::Line(line) = found { out.push(line.text.to_vec()) };
            for piece in pieces {
                tap.feed(Stream::Err, piece, ms(0), &mut take);
            }
            tap.end(&mut take);
            (out, tap.tail())
        };
        let mut rest = bytes.as_slice();
        let mut pieces = Vec::new();
        for cut in cuts.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (piece, after) = rest.split_at((*cut).min(rest.len()));
            pieces.push(piece);
            rest = after;
        }
        let whole = found(&mut std::iter::once(bytes.as_slice()));
        prop_assert_eq!(&found(&mut pieces.into_iter()), &whole);
        prop_assert!(whole.1.len() <= TAIL_LINES);
    }

    /// Garbage is shown unchanged, and never more than was written.
    #[test]
    fn garbage_is_a_line(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let mut tap = Tap::new(0);
        let mut total = 0;
        let mut take = |found: Found<'_>| if let Found::Line(line) = found { total += line.text.len() };
        tap.feed(Stream::Out, &bytes, ms(0), &mut take);
        tap.tick(ms(5000), &mut take);
        tap.end(&mut take);
        prop_assert!(total <= bytes.len());
    }
}

fn lines_of(tap: &mut Tap, bytes: &[u8], now: Duration) -> Vec<(String, u32, String)> {
    let mut out = Vec::new();
    let utf8 = |raw: &[u8]| String::from_utf8(raw.to_vec()).unwrap();
    tap.feed(Stream::Out, bytes, now, &mut |found| {
        if let Found::Line(line) = found {
            out.push((utf8(line.name), line.level, utf8(line.text)));
        }
    });
    out
}

#[test]
fn marks_say_who_and_what() {
    let mut tap = Tap::new(7);
    let mut options = None;
    tap.feed(Stream::Err, b"\x1eIps\x1f7\x1fgpus=7\x1fb1\x1f8\x1f1\x1f3000\x1f20\x1f\n", ms(0), &mut |found| {
        if let Found::Introduced(procs, found) = found {
            options = Some((procs, found));
        }
    });
    assert_eq!(options, Some((8, OPTIONS)));
    let shown = |name: &str, level, text: &str| (name.to_owned(), level, text.to_owned());
    assert_eq!(
        lines_of(&mut tap, b"raw\n\x1eL0\x1ft\x1f2\x1fgpus=2\x1fa\x1fb\n\x1eL30\x1f\x1f\x1f\x1flogged\n", ms(0)),
        [shown("ps", 0, "raw"), shown("t", 0, "a\x1fb"), shown("ps", 30, "logged")]
    );
    // Unfinished lines of two threads; an invalid mark.
    assert_eq!(lines_of(&mut tap, b"\x1eF1\x1ft\x1f2\x1f\x1fa\n\x1eF2\x1ft\x1f2\x1f\x1fc\n", ms(0)), []);
    assert_eq!(
        lines_of(&mut tap, b"\x1eC1\x1ft\x1f2\x1f\x1fb\n\x1eL\x1f\n\x1eC2\x1ft\x1f2\x1f\x1fd\n", ms(10)),
        [shown("t", 0, "ab"), shown("ps", 0, "\x1eL\x1f"), shown("t", 0, "cd")]
    );
    let mut set = None;
    tap.feed(Stream::Err, b"\x1eO99\x1f2\x1f0\x1f30\x1f\n", ms(0), &mut |found| {
        if let Found::Options(mesh, found) = found {
            set = Some((mesh, found));
        }
    });
    assert_eq!(set, Some((99, LogOptions { shown: false, alike: true, window: ms(0), level: 30 })));
}

#[test]
fn a_traceback_is_one_however_it_is_written() {
    let mut tap = Tap::new(0);
    let mut said = Vec::new();
    let mut say = |tap: &mut Tap, bytes: &[u8], at| {
        tap.feed(Stream::Err, bytes, ms(at), &mut |found| {
            if let Found::Line(line) = found {
                said.push(String::from_utf8([line.name, b":", line.text].concat()).unwrap());
            }
        });
        std::mem::take(&mut said)
    };
    // Line by line, with another actor's lines in between.
    assert!(say(&mut tap, b"\x1eL0\x1ft\x1f2\x1f\x1fTraceback (most recent call last):\n", 0).is_empty());
    assert_eq!(say(&mut tap, b"\x1eL0\x1fu\x1f0\x1f\x1fbetween\n", 0), ["u:between"]);
    assert!(say(&mut tap, b"\x1eU0\x1ft\x1f2\x1f\x1f  File \"a.py\"\x1d    x()\n", 0).is_empty());
    assert!(say(&mut tap, b"\x1eL0\x1ft\x1f2\x1f\x1fValueError: 1\n", 5).is_empty());
    assert_eq!(tap.deadline(), Some(ms(105)));
    let whole = "t:Traceback (most recent call last):\n  File \"a.py\"\n    x()\nValueError: 1";
    assert_eq!(
        say(&mut tap, b"\x1eL0\x1ft\x1f2\x1f\x1f\n\x1eL0\x1ft\x1f2\x1f\x1fafter\n", 6),
        [whole, "t:", "t:after"]
    );
    assert_eq!(tap.deadline(), None);
    // Unmarked, with nothing after it.
    assert!(say(&mut tap, b"Traceback (most recent call last):\n  File\nE: 2\n", 10).is_empty());
    let mut late = Vec::new();
    tap.tick(ms(110), &mut |found| late.push(format!("{found:?}")));
    assert_eq!((late.len(), tap.tail().len(), tap.deadline()), (1, 10, None));
}

#[test]
fn records_and_notices() {
    let mut tap = Tap::new(3);
    let mut out = Vec::new();
    let raw = b"\x1eR40\x1ft\x1f2\x1f\x1fERROR a\x1dTraceback (most recent call last):\x1fnot \x1f JSON\n\x1eN0\x1f\x1f\x1f\x1fmesh: a\n\x1eR40\x1ft\x1f2\x1f\x1fno record\n";
    tap.feed(Stream::Err, raw, ms(0), &mut |found| {
        if let Found::Line(line) = found {
            let utf8 = |raw: &[u8]| String::from_utf8(raw.to_vec()).unwrap();
            out.push((line.level, line.rank, utf8(line.text), utf8(line.record), line.alone));
        }
    });
    let told = |level, rank, text: &str, record: &str, alone| (level, rank, text.to_owned(), record.to_owned(), alone);
    assert_eq!(
        out,
        [
            told(40, 2, "ERROR a\nTraceback (most recent call last):", "not \x1f JSON", false),
            told(0, 3, "mesh: a", "", true),
            told(0, 3, "\x1eR40\x1ft\x1f2\x1f\x1fno record", "", false),
        ]
    );
}

#[test]
fn a_begun_line_is_shown_after_a_while() {
    let mut tap = Tap::new(0);
    assert_eq!(lines_of(&mut tap, b"Continue? ", ms(0)), []);
    assert_eq!(lines_of(&mut tap, b"\x1eF1\x1ft\x1f2\x1f\x1f10%\n", ms(0)).len(), 1);
    let mut tap = Tap::new(0);
    lines_of(&mut tap, b"Continue? ", ms(0));
    assert_eq!(tap.deadline(), Some(ms(1000)));
    let mut out = Vec::new();
    tap.tick(ms(999), &mut |_| panic!("too early"));
    tap.tick(ms(1000), &mut |found| out.push(format!("{found:?}")));
    assert_eq!(out.len(), 1);
    assert_eq!(tap.deadline(), None);
    // A mark that is being written is not torn.
    lines_of(&mut tap, b"\x1eL0\x1ft", ms(2000));
    assert_eq!(tap.deadline(), None);
    tap.flush(&mut |_| panic!("it is not complete"));
    assert_eq!(lines_of(&mut tap, b"\x1f2\x1f\x1fa\n", ms(9000)), [("t".to_owned(), 0, "a".to_owned())]);
}

#[test]
fn a_progress_bar_shows_a_state_now_and_then() {
    let mut tap = Tap::new(0);
    let mut shown = Vec::new();
    for tenth in 0..123 {
        let fragment = format!("\x1eF1\x1ft\x1f0\x1f\x1f\r{tenth}%\n");
        tap.tick(ms(tenth * 100), &mut |found| {
            if let Found::Line(line) = found {
                shown.push(String::from_utf8(line.text.to_vec()).unwrap());
            }
        });
        lines_of(&mut tap, fragment.as_bytes(), ms(tenth * 100));
    }
    tap.feed(Stream::Out, b"\x1eC1\x1ft\x1f0\x1f\x1f\rdone\n", ms(12_300), &mut |found| {
        if let Found::Line(line) = found {
            shown.push(String::from_utf8(line.text.to_vec()).unwrap());
        }
    });
    assert_eq!(shown, ["49%", "99%", "done"]);
}

#[test]
fn a_line_is_split_above_256_kib() {
    let mut tap = Tap::new(0);
    assert!(lines_of(&mut tap, &[b'x'; 256 * 1024], ms(0)).is_empty());
    let found = lines_of(&mut tap, b"x", ms(0));
    assert_eq!(found.iter().map(|(_, _, text)| text.len()).collect::<Vec<_>>(), [256 * 1024 + 1]);
}

#[test]
fn the_tail_has_forty_lines_of_500_bytes() {
    let mut tap = Tap::new(0);
    for n in 0..41 {
        let line = format!("{n:02}{}\n", "x".repeat(if n == 40 { 499 } else { 498 }));
        tap.feed(Stream::Err, line.as_bytes(), ms(0), &mut |_| {});
    }
    let tail = tap.tail();
    assert_eq!((tail.len(), &tail[0][..2], &tail[39][..2]), (40, "01", "40"));
    assert!(tail.iter().all(|line| line.len() == 500));
    tap.feed(Stream::Err, b"begun", ms(0), &mut |_| {});
    assert_eq!((tap.tail().len(), tap.tail()[39].as_str()), (40, "begun"));
}

#[test]
fn a_line_without_an_end_comes_in_pieces() {
    let mut tap = Tap::new(0);
    let mut total = 0;
    for n in 0..100 {
        total += lines_of(&mut tap, &[b'x'; 10_000], ms(n)).iter().map(|(_, _, text)| text.len()).sum::<usize>();
    }
    tap.end(&mut |found| {
        if let Found::Line(line) = found {
            total += line.text.len();
        }
    });
    assert_eq!(total, 1_000_000);
}
