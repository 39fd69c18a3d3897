//! The study over a dozen jobs, by eye.

use super::*;
