//! Messages for the person who runs this process.

use std::io::Write;
use std::sync::OnceLock;

/// Called with a text.
pub(crate) type Tell = Box<dyn Fn(String) + Send + Sync>;

/// A receiver of texts, once one is set.
#[derive(Default)]
pub(super) struct Teller(OnceLock<Tell>);

impl std::fmt::Debug for Teller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Teller")
    }
}

impl Teller {
    /// Sets the receiver. Only the first call has an effect.
    pub(super) fn set(&self, tell: Tell) {
        let _ = self.0.set(tell);
    }

    /// Passes a text to the receiver, if there is one.
    pub(super) fn tell(&self, text: String) {
        if let Some(tell) = self.0.get() {
            tell(text);
        }
    }

    /// Passes a text to the receiver, or prints it to standard error if there is none.
    pub(super) fn warn(&self, text: String) {
        match self.0.get() {
            Some(tell) => tell(text),
            None => {
                let _ = writeln!(std::io::stderr(), "mesh: {text}");
            }
        }
    }
}
