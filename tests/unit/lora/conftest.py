from tests.support.headers import headers_here as headers_here
