//! Times as Python represents them: seconds as floats.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::time::{Duration, Instant};

/// The longest time that the end of something is waited for.
const LONGEST_END: Duration = Duration::from_secs(3600);

/// Converts seconds to a duration; negative ones to zero.
pub(crate) fn duration(seconds: f64) -> PyResult<Duration> {
    if seconds.is_nan() {
        return Err(PyValueError::new_err("a timeout must be a number of seconds, got NaN"));
    }
    Ok(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX))
}

/// Converts the time limit for the end of something.
pub(crate) fn end_limit(seconds: f64) -> PyResult<Duration> {
    Ok(duration(seconds)?.min(LONGEST_END))
}

/// Converts a timeout to a deadline; `None` means forever.
pub(crate) fn deadline(timeout: Option<f64>) -> PyResult<Option<Instant>> {
    let Some(seconds) = timeout else { return Ok(None) };
    Ok(Instant::now().checked_add(duration(seconds)?))
}

/// Returns the seconds left until a deadline. Negative, and never 0, once it has passed.
pub(crate) fn left(due: Instant) -> f64 {
    let now = Instant::now();
    if due > now { (due - now).as_secs_f64() } else { -(now - due).max(Duration::from_nanos(1)).as_secs_f64() }
}
