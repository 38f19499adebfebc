//! A folder that stands for `/sys` and `/proc` in tests.

use std::fs;

use super::kernel::Kernel;

pub(crate) struct Tree(tempfile::TempDir);

impl Tree {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn file(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(crate) fn kernel(&self) -> Kernel {
        Kernel::at(self.0.path())
    }
}
