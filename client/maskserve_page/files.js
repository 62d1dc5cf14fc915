// A file's bytes in base64, as the page takes pictures. It stands before the script of a component.
async function base64Of(file) {
  const text = await new Promise((done, failed) => {
    const reader = new FileReader();
    [reader.onload, reader.onerror] = [() => done(reader.result), () => failed(reader.error)];
    reader.readAsDataURL(file);
  });
  return text.slice(text.indexOf(",") + 1);
}

