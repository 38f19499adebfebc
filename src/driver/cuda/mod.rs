//! The CUDA driver.

use std::sync::Arc;

use super::Backend;
use crate::{Error, Result};

pub(super) fn open() -> Result<Arc<dyn Backend>> {
    Err(Error::NoDriver {
        detail: "not yet".into(),
    })
}
