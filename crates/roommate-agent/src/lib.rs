//! One machine for real.
