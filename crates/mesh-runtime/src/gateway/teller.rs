//! Telling whoever runs this process.

use std::io::Write;
use std::sync::OnceLock;

/// What is called with a text.
pub(crate) type Tell = Box<dyn Fn(String) + Send + Sync>;

/// Somebody who is told something; nobody, until it is said who.
#[derive(Default)]
pub(super) struct Teller(OnceLock<Tell>);

impl std::fmt::Debug for Teller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Teller")
    }
}

impl Teller {
    /// Says who is told. The first word counts.
    pub(super) fn set(&self, tell: Tell) {
        let _ = self.0.set(tell);
    }

    /// Tells it to them, if there is somebody.
    pub(super) fn tell(&self, text: String) {
        if let Some(tell) = self.0.get() {
            tell(text);
        }
    }

    /// Tells it to them; on standard error, if there is nobody.
    pub(super) fn warn(&self, text: String) {
        match self.0.get() {
            Some(tell) => tell(text),
            None => {
                let _ = writeln!(std::io::stderr(), "mesh: {text}");
            }
        }
    }
}
