//! The names of frames.

/// The name of a message: sections separated by NUL bytes.
///
/// ```
/// # use mesh_proto::messages::Name;
/// let name = Name { what: b"step", shape: b"hosts=2", context: None };
/// assert_eq!(Name::read(&name.to_bytes()), name);
/// assert_eq!(Name::of(b"step").to_bytes(), b"step");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Name<'a> {
    /// The endpoint, the spawned actor, the extension or the question.
    pub what: &'a [u8],
    /// The target's shape, as `label=size` joined by commas; empty for a single receiver.
    pub shape: &'a [u8],
    /// The context of the trace that the message is part of, if any.
    pub context: Option<&'a [u8]>,
}

impl<'a> Name<'a> {
    /// The name of a message to a single receiver that is part of no trace.
    #[must_use]
    pub fn of(what: &'a [u8]) -> Self {
        Self { what, shape: b"", context: None }
    }

    /// Encodes this as bytes. Absent sections at the end are left out.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let context = self.context.unwrap_or_default();
        let mut out = Vec::with_capacity(self.what.len() + self.shape.len() + context.len() + 2);
        out.extend_from_slice(self.what);
        if !self.shape.is_empty() || self.context.is_some() {
            out.push(0);
            out.extend_from_slice(self.shape);
        }
        if self.context.is_some() {
            out.push(0);
            out.extend_from_slice(context);
        }
        out
    }

    /// Reads any bytes as a name.
    #[must_use]
    pub fn read(raw: &'a [u8]) -> Self {
        let mut sections = raw.split(|byte| *byte == 0);
        let mut next = || sections.next();
        Self { what: next().unwrap_or_default(), shape: next().unwrap_or_default(), context: next() }
    }

    /// The first section alone.
    #[must_use]
    pub fn what(raw: &'a [u8]) -> &'a [u8] {
        raw.split(|byte| *byte == 0).next().unwrap_or_default()
    }
}
