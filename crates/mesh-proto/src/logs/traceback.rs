//! Where a traceback begins and ends among its writer's lines, so that it stays one unit however it was written.

/// The end of a traceback's first line.
const LAST: &[u8] = b"(most recent call last):";
/// The same for the stack of a crash, which names no exception.
const FIRST: &[u8] = b"(most recent call first):";
const CAUSES: [&[u8]; 2] = [
    b"The above exception was the direct cause of the following exception:",
    b"During handling of the above exception, another exception occurred:",
];

/// The progress of a traceback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Traceback {
    /// In its frames; the exception will follow.
    Frames,
    /// In frames that no exception follows.
    Stack,
    /// After the exception: its parts may follow, or a sentence that joins another traceback to it.
    Raised,
    /// After an empty line, before that sentence.
    Pause,
    /// After the sentence.
    Joined,
}

impl Traceback {
    /// The state after the lines of `text`, written at once. `None` if no traceback begins there, or if it has ended.
    pub(super) fn begun(text: &[u8]) -> Option<Self> {
        if !text.contains(&b'\n') {
            return Self::header(text);
        }
        let mut state = None;
        for line in text.split(|byte| *byte == b'\n') {
            state = match state {
                None => Self::header(line),
                Some(state) => Self::after(state, line).or_else(|| Self::header(line)),
            };
        }
        state
    }

    fn header(line: &[u8]) -> Option<Self> {
        let line = line.trim_ascii_end();
        if line.ends_with(LAST) {
            let words = line[..line.len() - LAST.len()].trim_ascii_end();
            let group = line.first().is_some_and(u8::is_ascii_whitespace);
            Some(match words.ends_with(b"Traceback") {
                // A whole group is indented, including its exceptions.
                true if group => Self::Raised,
                true => Self::Frames,
                false => Self::Stack,
            })
        } else {
            line.ends_with(FIRST).then_some(Self::Stack)
        }
    }

    /// The state after `text`, whose lines were written at once; `None` if `text` does not belong to the traceback.
    pub(super) fn with(self, text: &[u8]) -> Option<Self> {
        let mut lines = text.split(|byte| *byte == b'\n');
        let mut state = self.after(lines.next()?)?;
        for line in lines {
            // What was written together with a part belongs to it, such as further lines of a message.
            state = state.after(line).or_else(|| Self::header(line)).unwrap_or(Self::Raised);
        }
        Some(state)
    }

    fn after(self, line: &[u8]) -> Option<Self> {
        let line = line.trim_ascii_end();
        let indented = line.first().is_some_and(u8::is_ascii_whitespace);
        match self {
            Self::Stack => indented.then_some(self),
            Self::Frames if indented => Some(self),
            Self::Frames => (!line.is_empty()).then_some(Self::Raised),
            Self::Joined if line.is_empty() => Some(self),
            Self::Joined => Self::header(line),
            Self::Raised | Self::Pause if CAUSES.contains(&line.trim_ascii()) => Some(Self::Joined),
            Self::Raised if line.is_empty() => Some(Self::Pause),
            // The members of a group.
            Self::Raised => indented.then_some(self),
            Self::Pause => None,
        }
    }

    /// Whether the exception is yet to come.
    pub(super) fn unfinished(self) -> bool {
        matches!(self, Self::Frames | Self::Joined)
    }
}

#[cfg(test)]
mod tests {
    use super::Traceback;

    /// The lines of each unit, written one by one.
    fn units(text: &str) -> Vec<usize> {
        let mut counts = Vec::new();
        let mut state: Option<Traceback> = None;
        for line in text.lines() {
            let next = state.and_then(|state| state.with(line.as_bytes()));
            if next.is_some() {
                *counts.last_mut().unwrap() += 1;
                state = next;
            } else {
                counts.push(1);
                state = Traceback::begun(line.as_bytes());
            }
        }
        counts
    }

    #[test]
    fn a_traceback_ends_with_its_exception() {
        let one = "before\nTraceback (most recent call last):\n  File \"a.py\", line 1, in f\n    x()\nValueError: 1\n";
        assert_eq!(units(&format!("{one}after\n")), [1, 4, 1]);
        let chained = format!(
            "{one}\nThe above exception was the direct cause of the following exception:\n\n{}",
            one.trim_start_matches("before\n")
        );
        assert_eq!(units(&format!("{chained}after\nafter\n")), [1, 11, 1, 1]);
        assert_eq!(
            units("Traceback (most recent call last):\n  File\nE: 1\nTraceback (most recent call last):\n"),
            [3, 1]
        );
    }

    #[test]
    fn groups_and_stacks() {
        let group = "  + Exception Group Traceback (most recent call last):\n  |   File \"a.py\", line 1\n  | ExceptionGroup: two\n  +-+---------------- 1 ----------------\n    | ValueError: 1\n    +------------------------------------\n";
        assert_eq!(units(&format!("{group}after\n")), [6, 1]);
        let crash = "Fatal Python error: Aborted\n\nCurrent thread 0x7f (most recent call first):\n  File \"a.py\", line 1\n\nafter";
        assert_eq!(units(crash), [1, 1, 2, 1, 1]);
    }

    #[test]
    fn what_was_written_at_once_belongs_together() {
        let frames = Traceback::begun(b"Traceback (most recent call last):\n  File\n    x()").unwrap();
        assert_eq!(frames, Traceback::Frames);
        assert_eq!(frames.with(b"ValueError: a\nmessage\nof lines"), Some(Traceback::Raised));
        assert_eq!(Traceback::begun(b"nothing of the kind"), None);
    }
}
