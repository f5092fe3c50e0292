//! Deliberately broken backends: the proof that the conformance suite bites.
//!
//! Each [`Fault`] is one realistic mistake of a backend's author, put between the suite and a backend that is right. The
//! test `matrix` runs every case of the suite against every fault: a fault that its cases let pass fails the build, and so
//! does a case that no fault can fail.

mod broken;
mod fault;
mod faults;
mod matrix;

pub use broken::Broken;
pub use fault::Fault;
pub use faults::faults;
pub use matrix::Around;
pub use matrix::Matrix;
