//! Times as Python has them: floats of seconds.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::time::{Duration, Instant};

/// No end is waited for longer than this.
const LONGEST_END: Duration = Duration::from_secs(3600);

/// Seconds as a duration. Negative ones count as none.
pub(crate) fn duration(seconds: f64) -> PyResult<Duration> {
    if seconds.is_nan() {
        return Err(PyValueError::new_err("a timeout must be a number of seconds, got NaN"));
    }
    Ok(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX))
}

/// The time that an end may take.
pub(crate) fn end_limit(seconds: f64) -> PyResult<Duration> {
    Ok(duration(seconds)?.min(LONGEST_END))
}

/// A timeout as a deadline; `None` means forever.
pub(crate) fn deadline(timeout: Option<f64>) -> PyResult<Option<Instant>> {
    let Some(seconds) = timeout else { return Ok(None) };
    Ok(Instant::now().checked_add(duration(seconds)?))
}

/// The seconds left until a deadline. Negative, and never 0, once it has passed.
pub(crate) fn left(due: Instant) -> f64 {
    let now = Instant::now();
    if due > now { (due - now).as_secs_f64() } else { -(now - due).max(Duration::from_nanos(1)).as_secs_f64() }
}
