//! What a host's operator says about it: labels and resources.

use crate::codec::{Reader, Writer};

/// Labels and resources of a host, as its agent was started with them.
///
/// ```
/// # use mesh_proto::control::Traits;
/// let traits = Traits::new(vec![("zone".into(), "a".into())], vec![("gpus".into(), 8.0)]).unwrap();
/// assert_eq!(traits.labels()[0].1, "a");
/// assert!(Traits::new(vec![], vec![("gpus".into(), f64::NAN)]).is_none());
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Traits {
    labels: Vec<(String, String)>,
    resources: Vec<(String, f64)>,
}

impl Traits {
    /// The most labels, and the most resources, that a host may have.
    pub const MOST: usize = 64;
    /// The longest name, in bytes.
    pub const LONGEST_NAME: usize = 64;
    /// The longest value of a label, in bytes.
    pub const LONGEST_VALUE: usize = 256;

    /// `None` if there are too many, a name is too long or empty, or a resource is not a valid amount.
    #[must_use]
    pub fn new(labels: Vec<(String, String)>, resources: Vec<(String, f64)>) -> Option<Self> {
        let named = |name: &str| !name.is_empty() && name.len() <= Self::LONGEST_NAME;
        let fits = labels.len() <= Self::MOST
            && resources.len() <= Self::MOST
            && labels.iter().all(|(name, value)| named(name) && value.len() <= Self::LONGEST_VALUE)
            && resources.iter().all(|(name, amount)| named(name) && amount.is_finite() && *amount >= 0.0);
        fits.then_some(Self { labels, resources })
    }

    /// By name.
    #[must_use]
    pub fn labels(&self) -> &[(String, String)] {
        &self.labels
    }

    /// By name.
    #[must_use]
    pub fn resources(&self) -> &[(String, f64)] {
        &self.resources
    }

    pub(super) fn write(&self, out: Writer) -> Writer {
        let out = out.list(&self.labels, |out, (name, value)| out.text(name).text(value));
        out.list(&self.resources, |out, (name, amount)| out.text(name).number(amount.to_bits()))
    }

    pub(super) fn read(raw: &mut Reader<'_>) -> Option<Self> {
        // Reading one more than allowed is enough to refuse all.
        let bounded = |seen: &mut usize| {
            *seen += 1;
            (*seen <= Self::MOST).then_some(())
        };
        let (mut labels, mut resources) = (0, 0);
        Self::new(
            raw.list(|raw| bounded(&mut labels).and_then(|()| Some((raw.text()?, raw.text()?))))?,
            raw.list(|raw| bounded(&mut resources).and_then(|()| Some((raw.text()?, f64::from_bits(raw.number()?)))))?,
        )
    }
}
