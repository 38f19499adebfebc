//! Reads a configuration from TOML.

use super::check::wrong;
use super::tables::ServiceConfig;
use crate::Result;
use crate::text::bounded;

/// How many bytes of a parser's message an error contains: the message quotes the file.
const MAX_EXCERPT: usize = 400;

impl ServiceConfig {
    /// Reads and checks a configuration.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) with the fault and its place: an unknown or
    /// missing key, an impossible value; the errors of [`check`](Self::check).
    ///
    /// ```
    /// use egmem::service::ServiceConfig;
    ///
    /// let config = ServiceConfig::from_toml(
    ///     r#"
    ///     listen = ["unix:/run/egmem/egmem.sock"]
    ///     [[buffer]]
    ///     name = "weights"
    ///     bytes = "16GiB"
    ///     gpu = 0
    ///     who = ["uid:1000"]
    ///     "#,
    /// )?;
    /// assert_eq!(config.buffers[0].bytes, 16 << 30);
    /// let error = ServiceConfig::from_toml("listen = []\nlisten_on = 1").unwrap_err();
    /// assert!(error.to_string().contains("listen_on"), "{error}");
    /// # Ok::<(), egmem::exchange::Error>(())
    /// ```
    pub fn from_toml(text: &str) -> Result<Self> {
        let config: Self = toml::from_str(text).map_err(|error| {
            let line = error
                .span()
                .and_then(|span| text.get(..span.start))
                .map_or(1, |before| before.matches('\n').count() + 1);
            wrong(format!(
                "line {line}: {}",
                bounded(error.message().trim(), MAX_EXCERPT)
            ))
        })?;
        config.check()?;
        Ok(config)
    }
}
